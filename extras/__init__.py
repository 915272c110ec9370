"""Not needed for a safe step: Muon, averaged weights, the step as a CUDA graph. See README.md."""
