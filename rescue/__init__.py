"""What a long run wants beyond the core: healing, verifying, planted faults, probes."""
