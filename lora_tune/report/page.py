# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML page: no script, no font and no address that a browser would fetch.

Everything that comes from the run is escaped. The page's own policy forbids whatever could be
loaded.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from lora_tune.hf.card import largest_rank, serve_command
from lora_tune.report.curves import curve, number
from lora_tune.report.folder import RunFolder
from lora_tune.training.metrics import columns_of

_STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1d2125;--soft:#5b646d;--rule:#dfe3e6;
--line:#1f6feb;--good:#1a7f37;--bad:#b42318;--warn:#9a6700}
@media (prefers-color-scheme:dark){:root{--bg:#14171a;--card:#1c2024;--ink:#e6e9eb;--soft:#9aa4ad;
--rule:#343b41;--line:#6cb0ff;--good:#4ac26b;--bad:#ff8078;--warn:#e3b341}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1120px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:1.6rem;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:36px 0 12px}
p{margin:6px 0;overflow-wrap:anywhere}.soft,figcaption,th,dt{color:var(--soft)}
.ended{border-left:4px solid var(--soft);padding:4px 12px;margin:12px 0}
.finished{border-color:var(--good)}.interrupted,.unknown{border-color:var(--warn)}
.tripwire,.failed{border-color:var(--bad)}
.tiles,.curves{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,minmax(170px,1fr))}
.curves{grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr))}
.tiles div,figure,.box{background:var(--card);border:1px solid var(--rule);border-radius:8px}
.tiles div{padding:10px 12px}.tiles b{display:block;font-size:1.15rem;overflow-wrap:anywhere}
.tiles span{color:var(--soft);font-size:.85rem}
figure{margin:0;padding:10px 12px 6px}
figcaption{font-size:.9rem}figcaption b{float:right;color:var(--ink)}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font-size:11px}
.up{text-anchor:end;dominant-baseline:central}.across{text-anchor:middle}
svg path{fill:none;stroke:var(--rule)}svg .axis,svg .tick{stroke:var(--soft)}
polyline{fill:none;stroke:var(--line);stroke-width:1.8;stroke-linejoin:round}
circle{fill:var(--line)}circle.many{fill:transparent}circle:hover{fill:var(--ink)}
.box{overflow:auto;max-height:480px}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{padding:6px 10px;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}
th{font-weight:500;white-space:nowrap}tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.said td{white-space:pre-wrap;overflow-wrap:anywhere;min-width:140px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;margin:0;padding:10px 12px}
dd{margin:0;overflow-wrap:anywhere}
pre{margin:0;padding:12px;font:13px/1.45 ui-monospace,monospace;white-space:pre-wrap;
overflow-wrap:anywhere}
summary{cursor:pointer;margin:6px 0}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_CURVES = (
    ("loss", "Training loss"),
    ("eval_loss", "Evaluation loss"),
    ("eval_accuracy", "Evaluation: answers right"),
    ("eval_token_accuracy", "Evaluation: tokens right"),
    ("eval_exact_match", "Evaluation: exact answers"),
    ("learning_rate", "Learning rate"),
    ("grad_norm", "Gradient norm"),
    ("tokens_per_second", "Tokens per second"),
    ("mfu", "Share of the devices' peak (MFU)"),
    ("input_bound_fraction", "Share of time waiting for data"),
)
_ENDS = {
    "finished": "Finished",
    "interrupted": "Interrupted",
    "tripwire": "Stopped because training had gone wrong",
    "failed": "Failed",
}


_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
"""Control characters, which HTML does not allow -> the signs that stand for them."""


def page(run: RunFolder) -> str:
    """The report of a run as HTML."""
    name = run.path.resolve().name
    body = "\n".join(part for part in _parts(run, name) if part).translate(_PICTURES)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(name)}: lora-tune</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _parts(run: RunFolder, name: str) -> Iterator[str]:
    base = run.lock.get("model", {}).get("base") or run.settings.get("model", {}).get("path")
    yield f"<h1>{escape(name)}</h1>"
    yield f'<p class="soft">A run of lora-tune on {escape(base or "an unknown base")}</p>'
    yield _ended(run)
    yield _tiles(run)
    drawn = "".join(curve(run.rows, key, title=title) for key, title in _curves(run.rows))
    yield _section("Curves", f'<div class="curves">{drawn}</div>' if drawn else "")
    yield _section("Answers before and after", _samples(run.rows))
    yield _section("Data", _data(run.summary.get("data", {})))
    yield _section("Use it", "".join(_uses(run)))
    yield _section("Adapted modules", _adapters(run.adapters))
    yield _section("Environment", _environment(run))
    yield _section("Recipe", f'<div class="box"><pre>{escape(run.recipe)}</pre></div>')


def _curves(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Columns to draw, each with a title; those of sets and sources follow the one of all data."""
    keys = dict.fromkeys(key for row in rows for key in row)
    for key, title in _CURVES:
        yield key, title
        for part, name in columns_of(key, keys).items():
            yield part, f"{title}, {name}"


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def ended(run: RunFolder) -> tuple[str, str]:
    """How a run ended: a key of `_ENDS` or "unknown", and a sentence."""
    end, total = run.summary.get("ended"), run.summary.get("total_steps")
    last = max((row["step"] for row in run.rows), default=0)
    of = "" if total is None else f" of {total:,}"
    if end:
        how = end.get("how", "")
        words = _ENDS.get(how, f"Ended in a way that this version does not know ({how!r})")
        said = f": {end['said']}" if end.get("said") else ""
        after = f"after step {end.get('step', last):,}{of}{said}"
        return how if how in _ENDS else "unknown", f"{words} {after}"
    if not run.summary:
        if run.adapter is not None or run.merged:
            return "finished", f"Finished; the last step in its log is {last:,}"
        return "unknown", f"Its end was not recorded; the last step in its log is {last:,}"
    return "unknown", (
        f"Not at its end: it still runs, or was killed; the last step in its log is {last:,}{of}"
    )


def _ended(run: RunFolder) -> str:
    how, said = ended(run)
    return f'<p class="ended {how}">{escape(said)}</p>'


def _tiles(run: RunFolder) -> str:
    steps = [row for row in run.rows if "tokens_per_second" in row]
    tiles = [("steps", f"{max((row['step'] for row in run.rows), default=0):,}")]
    tiles += _change(run.rows, "loss", "training loss")
    tiles += _change(run.rows, "eval_loss", "evaluation loss")
    tiles += _change(run.rows, "eval_accuracy", "answers right", percent=True)
    tiles += _change(run.rows, "eval_exact_match", "exact answers", percent=True)
    if steps:
        tiles.append(("tokens", f"{steps[-1].get('total_tokens', 0):,}"))
        tiles.append(("tokens per second, last", number(steps[-1]["tokens_per_second"])))
    parameters = run.summary.get("parameters")
    if parameters and "trained" in parameters:
        tiles.append(("parameters trained", f"{parameters['trained']:,}"))
    cells = "".join(f"<div><span>{escape(n)}</span><b>{escape(v)}</b></div>" for n, v in tiles)
    return f'<div class="tiles">{cells}</div>'


def _change(
    rows: Sequence[Mapping[str, Any]], key: str, name: str, *, percent: bool = False
) -> list[tuple[str, str]]:
    values = [row[key] for row in rows if key in row]
    if not values:
        return []
    ends = [
        f"{100 * v:.1f}\N{NO-BREAK SPACE}%" if percent else number(v)
        for v in (values[0], values[-1])
    ]
    return [(name, ends[0] if len(values) == 1 else " → ".join(ends))]


def _samples(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line for each prompt: what was answered first and last, and what was expected."""
    found = [row for row in rows if row.get("samples")]
    if not found:
        return ""
    first, last = found[0], found[-1]
    after = {sample.get("prompt"): sample for sample in last["samples"]}
    head = ["Prompt", f"After step {first['step']:,}", f"After step {last['step']:,}", "Expected"]
    lines = []
    for sample in first["samples"]:
        asked = sample.get("prompt", "")
        answers = (sample.get("answer", ""), after.get(asked, {}).get("answer", ""))
        lines.append([asked, *answers, sample.get("expected", "")])
    return _table(head, lines, kind="said")


def _data(data: Mapping[str, Any]) -> str:
    if not data:
        return ""
    plain = {key: value for key, value in data.items() if _is_fact(value)}
    facts = {key.replace("_", " "): _fact(key, value) for key, value in plain.items()}
    drops = data.get("drops") or {}
    facts["dropped"] = ", ".join(f"{count:,} {why}" for why, count in drops.items()) or "none"
    sources = data.get("sources") or []
    table = ""
    if len(sources) > 1:
        head = [key for key, value in sources[0].items() if _is_fact(value)]
        head = [key for key in head if key != "packing_efficiency"]  # of all sources together
        lines = [[_fact(key, source.get(key, "")) for key in head] for source in sources]
        table = _table([key.replace("_", " ") for key in head], lines)
    return _facts(facts) + table


def _is_fact(value: Any) -> bool:
    return value != "" and not isinstance(value, dict | list)


def _fact(key: str, value: Any) -> str:
    if key == "packing_efficiency":
        return f"{value:.1%} of the positions hold a token"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _uses(run: RunFolder) -> Iterator[str]:
    where, adapter = shlex.quote(str(run.path)), str(run.path / "adapter")
    if run.adapter is None and not run.merged:
        return
    asks = [f"lora-tune generate run={where} prompt='…'", f"lora-tune chat run={where}"]
    yield _code("Ask it", "\n".join(asks))
    if run.adapter is not None:
        base = run.adapter.get("base_model_name_or_path") or "BASE"
        lines = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            "",
            f'base = AutoModelForCausalLM.from_pretrained({base!r}, dtype="auto")',
            f"model = PeftModel.from_pretrained(base, {adapter!r})",
        ]
        yield _code("In Python, with PEFT", "\n".join(lines))
        if "r" in run.adapter:
            rank = largest_rank({"rank_pattern": {}, **run.adapter})
            yield _code("Served by vLLM", serve_command(base, rank, adapter))
    if run.merged:
        yield _code(
            "The merged model, served by vLLM",
            f"vllm serve {shlex.quote(str(run.path / 'merged'))}",
        )


def _code(title: str, code: str) -> str:
    return f'<p class="soft">{escape(title)}</p><div class="box"><pre>{escape(code)}</pre></div>'


def _adapters(lines: Sequence[Sequence[str]]) -> str:
    if len(lines) < 2:
        return ""
    head, rows = lines[0], lines[1:]
    what = f"{len(rows):,} modules, every one of them"
    table = _table(head, rows, numbers=range(3, len(head)))
    return f"<details><summary>{what}</summary>{table}</details>"


def _environment(run: RunFolder) -> str:
    facts = {key: str(value) for key, value in run.summary.get("environment", {}).items()}
    return _facts(facts | dict(run.lock.get("packages", {})))


def _facts(facts: Mapping[str, str]) -> str:
    if not facts:
        return ""
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items()
    )
    return f'<div class="box"><dl>{items}</dl></div>'


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    kind: str = "",
    numbers: Iterable[int] = (),
) -> str:
    right = set(numbers)

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="{"n" if i in right else ""}">{escape(str(text))}</{tag}>'
            for i, text in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="box"><table class="{kind}"><thead><tr>{cells("th", head)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
