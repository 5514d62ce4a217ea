"""Names of the Values that every GRPO step has."""

WEIGHTS = "weights"
GRADIENTS = "gradients"
HEAD_GRADIENTS = "gradients/head"
CLIP = "clip"
CHECKPOINT = "checkpoint"


def scores(work: str) -> str:
    """Return the name of the Value that holds the scores of a chunk or wave."""
    return f"{work}/scores"


def derivatives(work: str) -> str:
    """Return the name of the Value that holds the loss's derivatives by those scores."""
    return f"{work}/derivatives"
