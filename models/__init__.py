"""Models: one self-contained file each. `train.py` calls all of them alike: loss, metrics = model(images, labels)."""
