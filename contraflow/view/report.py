"""RUN/report.html: one self-contained page about one run, finished or not.

Takes a run's folder (recipe.toml, metrics.jsonl, episodes.jsonl, ledger), gives the page. Does not measure anything.
Everything that came from a model or a task is escaped or set as text.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from contraflow.algo.lengths import bin_name
from contraflow.errors import RunFolderError
from contraflow.telemetry import read_journal
from contraflow.view.charts import Points, curves, heat, shares
from contraflow.view.mismatch import mismatch_chart

Record = Mapping[str, Any]
EPISODE_GROUPS = 400  # kept in the page; the newest and an even choice of the older ones


def write_report(folder: Path) -> Path:
    """Write RUN/report.html and give its path. Raises RunFolderError if the folder holds no run."""
    if not (folder / "metrics.jsonl").is_file():
        raise RunFolderError(f"{folder} holds no metrics.jsonl: it is not the folder of a run, or none has begun there")
    recipe = (folder / "recipe.toml").read_text(encoding="utf-8")
    episodes = folder / "episodes.jsonl"
    kept = thin(read_journal(episodes)) if episodes.is_file() else []
    path = folder / "report.html"
    path.write_text(page(folder.name, recipe, read_journal(folder / "metrics.jsonl"), kept), encoding="utf-8")
    return path


def page(name: str, recipe: str, records: Sequence[Record], episodes: Sequence[Record]) -> str:
    """The whole page as text."""
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        by_kind.setdefault(record["kind"], []).append(record)
    steps, looks = by_kind.get("step", []), by_kind.get("eval", [])
    body = [
        f'<h1>{escape(name)}</h1><div class="sub">a contraflow run</div>',
        _facts(steps, looks, by_kind.get("pools", [])),
        '<div class="cards">',
        *_learning(steps, looks),
        *_system(steps, by_kind),
        _browser(),
        _card("Recipe", f"<details><summary>every setting</summary><pre>{escape(recipe)}</pre></details>", wide=True),
        '</div><div id="tip"></div>',
        f'<script type="application/json" id="episodes">{_embedded(episodes)}</script>',
        f"<script>{_asset('report.js')}</script>",
    ]
    head = f'<meta charset="utf-8"><title>{escape(name)}</title><style>{_asset("report.css")}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>"


def thin(records: Sequence[Record]) -> list[Record]:
    """At most EPISODE_GROUPS records, spread evenly over the run, the last ones included."""
    stride = -(-len(records) // EPISODE_GROUPS) or 1
    return list(reversed(records[::-1][::stride]))


def _facts(steps: Sequence[Record], looks: Sequence[Record], pools: Sequence[Record]) -> str:
    facts = [("steps", str(len(steps)))]
    if steps:
        facts += [("wall clock", f"{steps[-1]['at'] - steps[0]['at'] + sum(steps[0]['seconds'].values()):.0f} s")]
        facts += [("reward, first → last", f"{steps[0]['reward']:.2f} → {steps[-1]['reward']:.2f}")]
        facts += [("oldest trained token", f"age {max(step['age_max'] for step in steps)}")]
    if looks:
        facts += [("held-out, first → last", f"{looks[0]['accuracy']:.3f} → {looks[-1]['accuracy']:.3f}")]
    if pools:
        facts += [("groups dropped", str(_dropped(pools[-1])))]
        skipped = pools[-1]["groups"].get("dropped: curriculum")
        facts += [("of these not sampled, by the curriculum", str(skipped))] if skipped else []
        facts += [(f"solve rate of {kind}", f"{rate:.2f}") for kind, rate in pools[-1].get("solve_rates", {}).items()]
    return f'<div class="facts">{"".join(f"<div><b>{escape(v)}</b><span>{k}</span></div>" for k, v in facts)}</div>'


def _dropped(pools: Record) -> int:
    return sum(count for state, count in pools["groups"].items() if state.startswith("dropped"))


def _learning(steps: Sequence[Record], looks: Sequence[Record]) -> list[str]:
    parts = sorted({part for step in steps for part in step["parts"]})
    rewards = {"reward": _by_step(steps, "reward")}
    rewards |= {f"part: {part}": [(s["step"] + 1, s["parts"].get(part, 0.0)) for s in steps] for part in parts}
    ages = {"mean": _by_step(steps, "age_mean"), "max": _by_step(steps, "age_max")}
    health = {
        "entropy (nats)": _by_step(steps, "entropy"),
        "KL(behaviour, new) × 10": [(s["step"] + 1, 10 * s["behaviour_kl"]) for s in steps],
        "clipped share": [(s["step"] + 1, s["clipped_low"] + s["clipped_high"]) for s in steps],
    }
    return [
        _card("Reward of trained groups", curves(rewards, unit="by step", low=0.0, high=1.0)),
        _card(
            "Held-out accuracy",
            curves(_accuracy(looks), unit="by version", low=0.0, high=1.0),
            f"{_asked(looks)} to tasks that are never trained on; 95 %: bootstrap over tasks.",
        ),
        _card(
            "Age of trained tokens",
            curves(ages, unit="steps", low=0.0),
            "Steps between the version that sampled a token and the step that trains it.",
        ),
        _card("Policy health", curves(health, unit="by step", low=0.0)),
        _card("Gradient norm before clipping", curves({"norm": _by_step(steps, "grad_norm")}, unit="by step", low=0.0)),
        *_mismatch(steps),
        *_critic(steps),
    ]


def _mismatch(steps: Sequence[Record]) -> list[str]:
    """Where log-ratios come from; nothing where no step looked."""
    drawn = mismatch_chart(steps)
    return [] if drawn is None else [_card("Mismatch by cause", *drawn)]


def _critic(steps: Sequence[Record]) -> list[str]:
    """How well values foretell returns; nothing where there was no critic."""
    valued = [step for step in steps if step.get("critic_updates")]
    if not valued:
        return []
    told = {
        "value loss": _by_step(valued, "value_loss"),
        "explained variance": [(step["step"] + 1, max(step["explained_variance"], 0.0)) for step in valued],
        "clipped share": _by_step(valued, "value_clipped"),
    }
    note = "Explained variance: of returns, by the values that credit was given with. 1 is all; below 0 is drawn as 0."
    return [_card("Critic", curves(told, unit="by step", low=0.0), note)]


def _accuracy(looks: Sequence[Record]) -> dict[str, Points]:
    """Held-out accuracy with its interval, and pass@k of the most samples, if there are several."""
    looks = [look for look in looks if look["version"]]
    found: dict[str, Points] = {"accuracy": [(look["version"]["n"], look["accuracy"]) for look in looks]}
    for place, name in enumerate(("95 % from", "95 % to")):
        ends = [
            (look["version"]["n"], look["intervals"]["correct"][place])
            for look in looks
            if "correct" in look.get("intervals", {})
        ]
        found |= {name: ends} if ends else {}
    most = max((look.get("samples", 1) for look in looks), default=1)
    if most > 1:
        passed = [(k["version"]["n"], k["passed"][str(most)]) for k in looks if str(most) in k.get("passed", {})]
        found[f"pass@{most}"] = passed
    return found


def _asked(looks: Sequence[Record]) -> str:
    last = looks[-1] if looks else {}
    if not last.get("temperature"):
        return "Greedy answers"
    return f"{last['samples']} answers each, sampled at temperature {last['temperature']:g},"


def _system(steps: Sequence[Record], by_kind: Mapping[str, Sequence[Record]]) -> list[str]:
    pools, refreshes = by_kind.get("pools", []), by_kind.get("refresh", [])
    rates = {
        "rollout": _rates(pools, "rollout_tokens"),
        "train": _rates(pools, "train_tokens"),
    }
    stalls = {"stall": [(r["version"]["n"], 1000 * r["stall_s"]) for r in refreshes if r["served"]]}
    workers = {w["name"]: w["seconds"] for w in pools[-1]["workers"]} if pools else {}
    return [
        _card(
            "Tokens per second",
            curves(rates, unit="by second", low=0.0),
            "Rollout: sampled tokens. Train: trained tokens. Over the ticks of the run.",
        ),
        _card(
            "Refresh stall",
            curves(stalls, unit="ms by version", low=0.0),
            "How long an engine made no tokens while a new version was copied in and proved.",
        ),
        _card(
            "Where the seconds of each process went",
            shares(workers),
            "Each bar is all of that process's time: the causes sum to 100 %. The loop and the buffer only move ids.",
        ),
        _card(
            "Expert load",
            heat(_loads(steps), row_name="layer", column_name="expert"),
            "Tokens per expert over the last quarter of the steps, 1.00 being an even share.",
        ),
        *_routing(steps),
        *_placement(pools),
        *_forms(pools),
        _card("Groups", _table(pools[-1]["groups"] if pools else {})),
        *_lengths(by_kind.get("lengths", [])),
        _card("What went wrong", _troubles(by_kind)),
    ]


def _routing(steps: Sequence[Record]) -> list[str]:
    """How far replayed experts are from the router's own choice; nothing where none were replayed or lacking."""
    replayed = [step for step in steps if step.get("replayed_tokens")]
    missing, dropped = (sum(step.get(key, 0) for step in steps) for key in ("routes_missing", "routes_dropped"))
    if not replayed and not missing:
        return []
    layers = range(len(replayed[0]["routes_differ"]) if replayed else 0)
    differ = {f"MoE layer {m}": [(step["step"] + 1, step["routes_differ"][m]) for step in replayed] for m in layers}
    note = (
        "Share of replayed tokens that the trainer's own router would have sent to another set of experts."
        f" Without recorded experts: {missing} tokens; samples left out for it: {dropped}."
    )
    return [_card("Routing replay", curves(differ, unit="by step", low=0.0), note)]


def _placement(pools: Sequence[Record]) -> list[str]:
    """What placing experts did, by rollout worker; nothing where none was placed."""
    placed = pools[-1].get("placed", {}) if pools else {}
    if not placed:
        return []
    told = {
        name: f"{of['times']} times; last: {of['before']:.2f} before, {of['after']:.2f} after,"
        f" {of['in_order']:.2f} in order"
        for name, of in placed.items()
    }
    note = "Expert tokens of the busiest rank over the mean, on the loads that experts were last placed by."
    return [_card("Placement of experts", _table(told), note)]


def _forms(pools: Sequence[Record]) -> list[str]:
    """How tokens reach experts on other ranks, by process; nothing where every process holds all of them."""
    forms = pools[-1].get("forms", {}) if pools else {}
    if not forms:
        return []
    told = {name: "; ".join(lines) for name, lines in sorted(forms.items())}
    return [_card("Tokens to experts", _table(told), "What was asked for or measured, and what runs.", wide=True)]


def _lengths(records: Sequence[Record]) -> list[str]:
    """Lengths of what was trained against what was posed; nothing of runs that did not write them."""
    if not records:
        return []
    last = records[-1]
    posed, trained = last["posed"], last["trained"] + [0] * (len(last["posed"]) - len(last["trained"]))
    rows = {
        f"{bin_name(place)} tokens": f"{posed[place] / (sum(posed) or 1):.1%} posed,"
        f" {trained[place] / (sum(trained) or 1):.1%} trained"
        for place in range(len(posed))
        if posed[place] or trained[place]
    }
    rows |= {"mean trained / mean posed": f"{last['bias']:.3f}", "cut off by a deadline": str(last["cut"])}
    note = "Episodes by sampled tokens. Far from 1: long or short answers are dropped, cut off or still under way."
    return [_card("Length of answers", _table(rows), note)]


def _by_step(steps: Sequence[Record], key: str) -> Points:
    return [(step["step"] + 1, step[key]) for step in steps]


def _rates(pools: Sequence[Record], key: str) -> Points:
    """Tokens per second between ticks at least two seconds apart; shorter ones are noise."""
    points, last = [], None
    for record in pools:
        if last is None or record["at"] < last["at"]:  # a resume starts its clock anew
            last = record
        elif record["at"] - last["at"] >= 2.0:
            points.append((record["elapsed_s"], max(0, record[key] - last[key]) / (record["at"] - last["at"])))
            last = record
    return points


def _loads(steps: Sequence[Record]) -> list[list[float]]:
    recent = [step for step in steps[-max(1, len(steps) // 4) :] if step["expert_loads"]]  # none: nothing to teach
    if not recent:
        return []
    layers = [
        [sum(counts) for counts in zip(*layer, strict=True)]
        for layer in zip(*(s["expert_loads"] for s in recent), strict=True)
    ]
    return [[count * len(layer) / (sum(layer) or 1) for count in layer] for layer in layers]


def _troubles(by_kind: Mapping[str, Sequence[Record]]) -> str:
    first = next((r["at"] - r["elapsed_s"] for r in by_kind.get("pools", [])), 0.0)  # a clock's zero means nothing
    lines = [f"{r['at'] - first:.0f} s: {r['worker']} died: {r['detail']}" for r in by_kind.get("death", [])]
    lines += [f"{r['at'] - first:.0f} s: started again: {r['because']}" for r in by_kind.get("restart", [])]
    lines += [
        f"{r['at'] - first:.0f} s: {r['worker']} left: {r['finished']} groups finished,"
        f" {r['handed_back']} went on elsewhere"
        for r in by_kind.get("drained", [])
    ]
    if moved := by_kind.get("continued", []):
        lines.append(
            f"{sum(r['episodes'] for r in moved)} episodes were finished from where they had been broken off:"
            f" {sum(r['tokens'] for r in moved)} tokens were not sampled again"
        )
    lines += [r["text"] for r in by_kind.get("alarm", [])]
    lines += [f"step {r['step']}: not applied: {r['fault']}" for r in by_kind.get("step", []) if not r["applied"]]
    lines += [
        f"version {r['version']['n']} refused: {r['reason']}" for r in by_kind.get("refresh", []) if not r["served"]
    ]
    failed = sum(r["failed"] for r in by_kind.get("step", []))
    if failed:
        lines.append(f"{failed} episodes failed and were left out of training")
    return "<br>".join(escape(line) for line in lines) or '<p class="empty">nothing</p>'


def _browser() -> str:
    picks = '<div class="pick">step <select id="step"></select> group <select id="group"></select></div>'
    note = "Green earned more than its group's mean, red less. Hover a token for log-probability, advantage, version."
    return _card("Sampled episodes", f'{picks}<div id="list"></div>', note, wide=True)


def _table(rows: Mapping[str, Any]) -> str:
    cells = "".join(f"<tr><th>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>" for k, v in rows.items())
    return f"<table>{cells}</table>" if cells else '<p class="empty">nothing recorded</p>'


def _card(title: str, body: str, note: str = "", *, wide: bool = False) -> str:
    below = f"<p>{escape(note)}</p>" if note else ""
    return f'<section class="card{" wide" if wide else ""}"><h2>{escape(title)}</h2>{body}{below}</section>'


def _embedded(episodes: Sequence[Record]) -> str:
    """JSON that cannot end its script element, whatever a model wrote."""
    return json.dumps(list(episodes), separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return files("contraflow.view").joinpath(name).read_text(encoding="utf-8")
