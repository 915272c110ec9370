"""Which statements bring inputs and labels into two different orders."""

import ast

import pytest

from autopsy.silent.data import shuffled_apart

APART = """
np.random.shuffle(images)
np.random.shuffle(labels)
---
x = x[torch.randperm(n)]
y = y[torch.randperm(n)]
---
def prepare():
    random.shuffle(train_images)
    count = len(train_images)
    random.shuffle(train_labels)
---
X_train, y_train = X_train[np.random.permutation(n)], y_train[np.random.permutation(n)]
---
state = np.random.get_state()
np.random.shuffle(train[0].numpy())
pass
np.random.shuffle(train[1].numpy())
---
self.rng.shuffle(self.data)
self.rng.shuffle(self.targets)
---
np.random.shuffle(trainX)
np.random.shuffle(trainY)
"""
TOGETHER = """
state = np.random.get_state()
np.random.shuffle(images)
np.random.set_state(state)
np.random.shuffle(labels)
---
np.random.seed(7)
np.random.shuffle(x_train)
np.random.seed(7)
np.random.shuffle(y_train)
---
random.Random(1).shuffle(x)
random.Random(1).shuffle(y)
---
order = torch.randperm(n)
x, y = x[order], y[order]
"""
OTHERS = """
np.random.shuffle(train_data)
np.random.shuffle(test_data)
---
random.shuffle(train_x)
random.shuffle(test_y)
---
np.random.shuffle(source_data)
np.random.shuffle(target_data)
---
np.random.shuffle(indices[0])
np.random.shuffle(indices[1])
---
np.random.shuffle(y)
---
if whole:
    np.random.shuffle(x)
else:
    np.random.shuffle(y)
"""


def pairs(source):
    blocks = shuffled_apart._blocks(ast.parse(source))
    return [pair for block in blocks for pair in shuffled_apart._pairs(block)]


@pytest.mark.parametrize("source", APART.split("---"))
def test_inputs_and_labels_in_two_orders_are_told(source):
    assert len(pairs(source)) == 1


@pytest.mark.parametrize("source", [*TOGETHER.split("---"), *OTHERS.split("---")])
def test_one_order_for_both_and_what_is_no_pair_are_not_told(source):
    assert not pairs(source)
