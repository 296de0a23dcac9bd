"""Calibration: how large activations get on given texts, and the scales that follow."""
