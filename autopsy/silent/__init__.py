"""
Silent: faults that make no NaN. Weights that do not move, a loss that jumps.

A check is one file: a class that overrides events of watch/events.py. A check of several files is a
folder, and its class stands in __init__.py: weights/stalled/, data/same_numbers/ and spikes/. No
check imports another one: delete a check, and the others work as before. What several of them need
is in shared/. Delete a file there, and the report says which checks are off without it. Delete all
of silent/, and autopsy finds NaN and inf as before. The first line of each file is the question
that it answers.

    loop/        what a loop does, and in which order: clear, backward, clip, step, schedule
    weights/     weights that do not move
    state/       what is kept beside the weights that train, and what differs from it
    data/        what a loader brings, and in which order
    loss/        what a loss is given, and what of it trains
    network/     what a network takes its dimensions and masks for
    evaluation/  what an evaluation does otherwise than training
    spikes/      a loss or a gradient norm that jumps: one check
    shared/      what several checks need
"""
