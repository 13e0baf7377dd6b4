"""How many captures ``fc`` takes, as an engine reads it from a config.

May import ``drafts``, ``layer_ids`` and ``sizes``.
"""

from __future__ import annotations

from hsformat.engines.drafts import ABSENT, MAX_COUNT, Draft, lookup
from hsformat.engines.layer_ids import FedDepths
from hsformat.engines.rows import DraftRow
from hsformat.engines.sizes import DraftSizes
from hsformat.problems import Problem, problem

__all__ = ["check_skipped_fc", "fc_captures"]


def fc_captures(draft: Draft, row: DraftRow, fed: FedDepths, title: str, problems: list[Problem]) -> int:
    """Return the number of captures that the engine makes fc take; HS402 if another number arrives."""
    count, source = row.count_default, f"{title}'s default"
    for path in row.count_keys:
        value = lookup(draft.config, path)
        if value is ABSENT or value is None:
            continue
        if path.rpartition(".")[2] == "eagle_aux_hidden_state_layer_ids":  # counted; fed_depths says what is no list
            if not isinstance(value, list) or not value:
                continue
            value = len(value)
        if type(value) is not int or not 0 < value <= MAX_COUNT:
            where, expected = draft.at(path), f"an integer from 1 to {MAX_COUNT}"
            fix = "write how many layer ids there are, or leave it out where the engine counts them"
            problems.append(problem("HS603", where=where, got=repr(value)[:100], expected=expected, fix=fix))
            continue
        count, source = value, path
        break
    if fed.depths is not None and len(fed.depths) != count:
        listed = ", ".join(f"d{d}" for d in fed.depths)
        fix = (
            f"write {row.count_keys[0]}: {len(fed.depths)}"
            if row.count_keys
            else f"{title} makes fc for {count} captures whatever the config says: use {count}, or another version"
        )
        got = f"{len(fed.depths)} aux captures [{listed}]"
        where, expected = draft.at("layer ids"), f"{count}, for which fc is made ({source})"
        problems.append(problem("HS402", where=where, got=got, expected=expected, fix=fix))
    return count


def check_skipped_fc(draft: Draft, sizes: DraftSizes, row: DraftRow, captures: int, title: str) -> list[Problem]:
    """Return HS402 if the engine leaves ``fc`` out because the captures are together as wide as the draft."""
    if not row.single_capture_skips_fc or sizes.target_hidden_size * captures != sizes.hidden_size:
        return []
    fix = "use more than one capture, or an engine that applies fc to one"
    where, got = draft.at("hidden_size"), f"captures that are together as wide as the draft: {title} leaves fc out"
    return [problem("HS402", where=where, got=got, expected="captures that fc must narrow", fix=fix)]
