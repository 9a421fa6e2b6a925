"""The cells of the rescue ramp: their names and outcomes."""

from typing import Any

ARMS = ("none", "evict", "rescue", "retrieval")
WHOLE = ("none", "retrieval")  # arms that evict nothing, so they are the same for every budget
DEPTHS = (0.0, 0.5, 1.0)
Setting = tuple[str, str, int]  # policy, budget, rung
Cells = dict[str, dict[str, Any]]


def key(arm: str, cell: dict[str, Any]) -> str:
    setting = [] if arm in WHOLE else [cell["policy"], cell["budget"]]
    return " ".join([arm, *setting, str(cell["rung"]), f"{cell['depth']:g}", str(cell["seed"])])


def outcome(cell: dict[str, Any], cells: Cells) -> str:
    """Rate a hit native if any of the needle was live; rescue only if none was and the same case fails without."""
    if cells[key("none", cell)]["verdict"] != "PASS":
        return "void"
    if cell["verdict"] != "PASS":
        return "miss"
    if cell["arm"] in WHOLE or cell["live"]:
        return "native"
    return "rescue" if cell["arm"] == "rescue" and cells[key("evict", cell)]["verdict"] != "PASS" else "luck"


def cells_of(arm: str, setting: Setting, cells: Cells) -> list[dict[str, Any]]:
    """Return the cells of an arm where all four arms were measured."""
    policy, budget, rung = setting
    some = [c for c in cells.values() if c["arm"] == arm and c["rung"] == rung]
    if arm not in WHOLE:
        some = [c for c in some if (c["policy"], c["budget"]) == (policy, budget)]
    return [c for c in some if all(key(a, {**c, "policy": policy, "budget": budget}) in cells for a in ARMS)]


def settings(cells: Cells) -> list[Setting]:
    found = {(c["policy"], c["budget"], c["rung"]) for c in cells.values() if c["arm"] not in WHOLE}
    return sorted(found, key=lambda setting: (setting[2], setting[0], setting[1]))
