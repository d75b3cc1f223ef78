"""Mathematics of attention: errors of approximations, spectra, variance."""
