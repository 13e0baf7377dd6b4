"""Probes: what an installed engine really feeds a draft, found by running it (``hsformat engines probe``).

``trials``      lists of layer ids that are asked of the engine, one draft folder each
``tiny``        a tiny random target, and a draft
``vllm``, ``sglang``   one engine each: how it is started and given a prompt
``serve``       the child process that runs an engine; ``watch`` is what it notes
``child``       starting it, and what it dies of
``reference``   the same prompt by Transformers in float32
``analysis``    which depth a slot holds, and which row says all of it
``draft_trials``   draft folders that show what is made of each part of one
``draft_math``     what an engine computes from one, in NumPy
``draft_proof``    whether it did what a row says
``probe``       all of it in order; the class behind the entry points

Found by entry point (group ``hsformat.probes``). Importing this package, or the classes behind the entry points,
imports no engine and no torch.
"""
