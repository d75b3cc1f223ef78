"""Convert pretrained models: texts, calibration, distillation, measurement, judging, advice and reports."""
