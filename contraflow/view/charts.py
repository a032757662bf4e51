"""Three drawings as inline SVG: curves over steps, shares as stacked bars, a heat map.

Takes numbers and labels, gives markup whose every text is escaped. Does not read runs or lay out pages.
Colours are CSS variables of report.css, so that both colour schemes work.
"""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 28
COLOURS = 12  # --c0 ... --c11 in report.css

Points = Sequence[tuple[float, float]]


def curves(series: Mapping[str, Points], *, unit: str = "", low: float | None = None, high: float | None = None) -> str:
    """Lines of (x, y) points on one pair of axes, with a legend; `low` and `high` are included in the y axis."""
    points = [point for line in series.values() for point in line]
    if not points:
        return '<p class="empty">nothing recorded</p>'
    xs = [x for x, _ in points]
    ys = [y for _, y in points] + [bound for bound in (low, high) if bound is not None]
    frame = _Frame(min(xs), max(xs), min(ys), max(ys))
    body = [_grid(frame, unit)]
    for index, line in enumerate(series.values()):
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line)
        marks = "".join(_dot(frame, x, y, index) for x, y in line) if len(line) <= 30 else ""
        body.append(f'<polyline class="line" style="stroke:{_colour(index)}" points="{path}"/>{marks}')
    return _svg(WIDTH, HEIGHT, body) + _legend(list(series))


def shares(rows: Mapping[str, Mapping[str, float]], *, unit: str = "s") -> str:
    """One bar a row, split by cause; every bar is 100 % of its row's sum, which is written beside it."""
    if not rows:
        return '<p class="empty">nothing recorded</p>'
    causes = sorted(
        {cause for row in rows.values() for cause in row}, key=lambda c: -sum(r.get(c, 0) for r in rows.values())
    )
    body, step, left, width = [], 34, 110, WIDTH - 110 - 70
    for index, (name, row) in enumerate(rows.items()):
        total, x, y = sum(row.values()) or 1.0, float(left), index * step + 6
        body.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        for cause in causes:
            part = row.get(cause, 0.0) / total
            tip = f"{name}: {cause} {row.get(cause, 0.0):.1f} {unit} ({100 * part:.1f} %)"
            body.append(_box(x, y, part * width, 22, _colour(causes.index(cause)), tip))
            if part > 0.07:
                body.append(f'<text class="on" x="{x + part * width / 2:.1f}" y="{y + 15}">{100 * part:.0f}%</text>')
            x += part * width
        body.append(f'<text x="{left + width + 8}" y="{y + 15}">{total:.1f} {unit}</text>')
    return _svg(WIDTH, len(rows) * step + 6, body) + _legend(causes)


def heat(rows: Sequence[Sequence[float]], *, row_name: str, column_name: str) -> str:
    """A table of numbers as colour; each cell also says its value. 1.0 is even, and is the middle of the scale."""
    if not rows or not rows[0]:
        return '<p class="empty">nothing recorded</p>'
    cell = max(18.0, min(52.0, (WIDTH - 90) / len(rows[0])))
    body = []
    for r, row in enumerate(rows):
        body.append(f'<text x="80" y="{r * 30 + 38}" text-anchor="end">{escape(row_name)} {r}</text>')
        for c, value in enumerate(row):
            strength = min(1.0, value / 2)
            colour = f"color-mix(in oklab, var(--c0) {100 * strength:.0f}%, var(--page))"
            body.append(_box(88 + c * cell, r * 30 + 20, cell - 2, 28, colour, f"{column_name} {c}: {value:.2f}"))
            if cell >= 36:
                style = "on" if strength > 0.55 else "in"
                body.append(
                    f'<text class="{style}" x="{88 + c * cell + cell / 2 - 1:.1f}" y="{r * 30 + 38}">{value:.2f}</text>'
                )
    body.append(f'<text x="88" y="12">{escape(column_name)} 0 to {len(rows[0]) - 1}</text>')
    return _svg(WIDTH, len(rows) * 30 + 24, body)


class _Frame:
    """Data coordinates to pixels."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float) -> None:
        self.x_low, self.x_high = x_low, x_high if x_high > x_low else x_low + 1
        pad = (y_high - y_low) * 0.05 or abs(y_high) * 0.05 or 1.0
        self.y_low, self.y_high = y_low - (pad if y_low < 0 else 0), y_high + pad

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def _grid(frame: _Frame, unit: str) -> str:
    parts = []
    for value in _ticks(frame.y_low, frame.y_high):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>')
    parts += [
        f'<text x="{frame.x(value):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{_short(value)}</text>'
        for value in _ticks(frame.x_low, frame.x_high)
    ]
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{TOP}" text-anchor="end">{escape(unit)}</text>')
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Round values inside [low, high]: at most six, at steps of 1, 2 or 5 times a power of ten."""
    step = 10.0 ** _exponent((high - low) / 5)
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 5)
    first = -(-low // step)
    return [index * step for index in range(int(first), int(high // step) + 1)]


def _exponent(value: float) -> int:
    return int(f"{value:e}".split("e")[1])


def _short(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}"


def _dot(frame: _Frame, x: float, y: float, index: int) -> str:
    tip = f"<title>{_short(x)}: {y:.4g}</title>"
    return f'<circle r="2.5" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" style="fill:{_colour(index)}">{tip}</circle>'


def _box(x: float, y: float, width: float, height: float, colour: str, tip: str) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height}"'
    return f'<rect {size} style="fill:{colour}"><title>{escape(tip)}</title></rect>'


def _colour(index: int) -> str:
    return f"var(--c{index % COLOURS})"


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    items = (f'<span><i style="background:{_colour(i)}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<div class="legend">{"".join(items)}</div>'


def _svg(width: int, height: int, body: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(body)}</svg>'
