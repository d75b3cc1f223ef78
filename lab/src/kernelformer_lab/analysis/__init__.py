"""Mathematics of attention: errors of approximations, spectra, variance of features and over redraws."""
