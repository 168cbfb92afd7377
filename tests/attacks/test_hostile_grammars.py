"""A grammar costs no one but its own request, whatever it is."""

from collections import Counter
from typing import Any

import hostile
from serving_alone import LONG, PATIENCE, Neighbour, Victim

DRAWN = 1000 if LONG else 40


def ask(victim: Victim, form: dict[str, Any]) -> int:
    body = {"prompt": "the cat", "max_tokens": 6, "structured_outputs": form}
    return victim.http.post("/v1/completions", json=body, timeout=PATIENCE).status_code


def attack(victim: Victim, forms: list[tuple[str, dict[str, Any]]]) -> Counter[int]:
    """Send all of them; how many answers had which status."""
    statuses = Counter[int]()
    for name, form in forms:
        status = ask(victim, form)
        assert status in (200, 400, 413), name
        assert victim.healthy(), f"the server has ended: {name}"
        statuses[status] += 1
    return statuses


def test_by_size(victim: Victim, count: Any) -> None:
    neighbour = Neighbour(victim)
    with neighbour.asking():
        statuses = attack(victim, hostile.fixed())
    assert not neighbour.failures and victim.answers()
    assert statuses[200] > 10 and statuses[400] > 10, statuses
    count("hostile grammars", sum(statuses.values()))
    count("of them compiled", statuses[200])
    count("ms: a neighbour's longest wait for a token", round(1000 * neighbour.worst))


def test_drawn(victim: Victim, count: Any) -> None:
    statuses = attack(victim, hostile.drawn(DRAWN, seed=19))
    assert victim.answers()
    count("drawn grammars", sum(statuses.values()))


def test_in_tools_and_response_formats(victim: Victim, count: Any) -> None:
    """Schemas come by other fields, too."""
    schemas = [form["json"] for _, form in hostile.fixed() if isinstance(form.get("json"), dict)]
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    for schema in schemas:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        format_ = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        for more in ({"tools": [tool], "tool_choice": "required"}, {"response_format": format_}):
            status = victim.http.post("/v1/chat/completions", json=chat | more).status_code
            assert status in (200, 400, 413) and victim.healthy()
    assert victim.answers()
    count("hostile schemas in tools and formats", 2 * len(schemas))
