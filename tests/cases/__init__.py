"""Situations from training scripts, each with the outcome that it must have.

Functions without ``test_`` run in the workers of a ``LocalCluster``.  What they are compared
with is never p3: MXNet in one process, NumPy, or a number worked out by hand.
"""
