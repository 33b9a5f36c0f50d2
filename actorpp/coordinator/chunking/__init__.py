"""How prompts are cut into chunks: policies, what a step costs, and plans. No I/O but the profile's file; no torch.

===============  ======================================================================================================
``policy``       what a policy is: ``ChunkPolicy``, what it is asked (``ChunkRequest``), what it may know
                 (``PolicyContext``)
``fixed``        ``FixedChunks``: one size
``sglang``       ``SglangChunks``: SGLang's dynamic chunking
``planned``      ``PlannedChunks``: every prompt planned as a whole, the default
``choose``       ``make_policy``: by name, or a class of the user's own by import path
``cost``         ``StageCost``, ``CostModel``: seconds of a step from its history and tokens
``operations``   the same from the model's operation counts, before anything was measured
``fit``          least squares over samples
``learner``      learns costs while the engine runs
``flowshop``     when steps leave a pipeline: ``makespan``
``search``       ``best_chunks``: the chunks with the smallest makespan
``plan``         ``ChunkPlan``: what a policy would do with a prompt, and how long it would take
``profile``      ``Profile``: measured samples, their fit, and the file that keeps them
===============  ======================================================================================================

The formulas, their sources, and how to write a policy are in docs/chunking.md.
"""
