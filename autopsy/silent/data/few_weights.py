"""
Few weights: has a WeightedRandomSampler a weight for each class, and not for each sample?

It draws the numbers of its weights: with one for each of two classes, the samples 0 and 1, again
and again. Nothing fails. Told is a loader whose sampler has fewer weights than its data has
samples.
"""

from torch.utils.data import WeightedRandomSampler

from ...frames import line_now
from ...watch.events import Events


class FewWeights(Events):
    """Weights of samplers."""

    def __init__(self, watch):
        self.found = {}  # line that iterates a loader: (weights, samples)

    def iterated(self, loader):
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        if isinstance(sampler, WeightedRandomSampler) and loader.batch_sampler:
            counts = len(sampler.weights), len(loader.dataset)
            if counts[0] < counts[1]:
                self.found[line_now()] = counts

    def sentences(self):
        for line, (weights, samples) in self.found.items():
            yield (
                f"the WeightedRandomSampler of the loader at {line} has {weights} weights for "
                f"{samples} samples, and draws none but the first {weights}: it takes a weight for "
                "each sample: weights_of_classes[labels]"
            )
