"""Model families: what the engine must know to evaluate one chunk by chunk.

Lives here: one adapter a family over Hugging Face's own modules, each with its state schema, the forward of a chunk,
attention over pages, and costs.

May import ``engine``. Never ``stages`` or ``plans``.
"""
