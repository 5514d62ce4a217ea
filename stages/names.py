"""Names of the Values of a GRPO run.

What lives through the whole run has a constant name; what belongs to one step, one update, one group or one chunk has
a function. An *update* is one optimizer update: an epoch of a step. ``step0/`` begins what belongs to a step,
``step0/epoch1/`` what belongs to one of its epochs where it has several. What every *shard* of the model has
(`stages.spans`) ends in the shard's name; the one shard of a whole model has none.
"""

WEIGHTS = "weights"
CHECKPOINT = "checkpoint"
OPTIMIZER = "optimizer"


def step_prefix(step: int) -> str:
    """Return how the names of a step's stages and Values begin."""
    return f"step{step}/"


def update_prefix(step: int, epoch: int, epochs: int) -> str:
    """Return how the names of an update's stages and Values begin: the step's own prefix where it has one epoch."""
    return step_prefix(step) if epochs == 1 else f"{step_prefix(step)}epoch{epoch}/"


def of_shard(name: str, shard: str) -> str:
    """Return the name of what ``name`` is in a shard."""
    return f"{name}/{shard}" if shard else name


def shard_weights(shard: str) -> str:
    """Return the name of a shard's weights."""
    return of_shard(WEIGHTS, shard)


def gradients(update: str, shard: str = "") -> str:
    """Return the name of the gradients of a shard's parameters in an update, given by its prefix."""
    return of_shard(f"{update}gradients", shard)


def norms(update: str, shard: str = "") -> str:
    """Return the name of the norms of the gradients of a shard's parameters."""
    return of_shard(f"{update}norms", shard)


def entry(work: str, span: int) -> str:
    """Return the name of the hidden state with which a chunk enters a span."""
    return f"{work}/entry/{span}"


def entry_cotangent(work: str, span: int) -> str:
    """Return the name of that hidden state's cotangent."""
    return f"{work}/entry_cotangent/{span}"


def head_gradients(update: str) -> str:
    """Return the name of the head's own share of a tied embedding's gradient."""
    return f"{update}gradients/head"


def lookup(update: str) -> str:
    """Return the name of the look-up's share of a tied embedding's gradient: rows of the ids that occur."""
    return f"{update}gradients/lookup"


def lookup_ids(update: str) -> str:
    """Return the name of the ids that those rows belong to, in ascending order."""
    return f"{update}gradients/ids"


def clip(update: str) -> str:
    """Return the name of the factor that clipping puts on the gradients."""
    return f"{update}clip"


def scores(work: str) -> str:
    """Return the name of the Value that holds the scores of a chunk or wave."""
    return f"{work}/scores"


def derivatives(work: str) -> str:
    """Return the name of the Value that holds the loss's derivatives by those scores."""
    return f"{work}/derivatives"


def rollout(step: int, group: int) -> str:
    """Return the name of the sampled responses of a group: ``token_ids``, ``lengths`` and ``logprobs``."""
    return f"{step_prefix(step)}group{group}/rollout"


def rewards(step: int, group: int) -> str:
    """Return the name of the rewards of a group's sampled responses, [responses] float64."""
    return f"{step_prefix(step)}group{group}/rewards"


def advantages(step: int, group: int) -> str:
    """Return the name of the advantages of a group's sampled responses, [responses, tokens] float64."""
    return f"{step_prefix(step)}group{group}/advantages"
