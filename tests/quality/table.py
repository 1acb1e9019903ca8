"""The comparison as Markdown and as a drawing: KL divergence against bits per weight.

    table.py OUT FIGURES…      OUT.md and OUT.svg; each FIGURES is MODEL/figures.json of compare.py
"""

import json
import math
import sys
from pathlib import Path

PEERS = {"shardpack": "#1f6feb", "llama.cpp": "#d1570b", "mlx-lm": "#2da44e"}
POINTS = (4.5, 4.6, 4.7, 4.8, 4.9, 5.0, 5.5, 5.6, 5.7, 6.5)
# The end of a curve stands for a point that is so little beyond it.
BEYOND = 0.02
PANEL, HEIGHT, LEFT, TOP, BOTTOM = 330, 300, 48, 44, 36


def frontier(figures, peer):
    """A peer's best: every point that no smaller or equal one of its own undercuts."""
    found = []
    for bits, kl in sorted((it["bits_per_weight"], it["kl"]) for it in figures if it["peer"] == peer):
        if not found or kl < found[-1][1]:
            found.append((bits, kl))
    return found


def at(points, bits):
    """KL at so many bits: log KL is a straight line between neighbouring points."""
    for (x, y), (x1, y1) in zip(points, points[1:]):
        if x <= bits <= x1:
            share = (bits - x) / (x1 - x)
            return math.exp((1 - share) * math.log(y) + share * math.log(y1))
    return next((y for x, y in points if abs(x - bits) <= BEYOND), None)


def plain(kl):
    """Three digits, without an exponent."""
    return f"{kl:.{max(0, 2 - math.floor(math.log10(kl)))}f}"


def shown(name):
    return f"`{name}`" if name.startswith("--") else name


def figures_table(models):
    lines = ["| | | " + " | ".join(f"{it}: bits, KL" for it in models) + " |", "|---" * (2 + len(models)) + "|"]
    rows = []
    for figures in models.values():
        rows += [row for it in figures if (row := (it["peer"], it["name"])) not in rows and it["peer"] in PEERS]
    size = {(it["peer"], it["name"]): it["bits_per_weight"] for figures in models.values() for it in figures}
    for peer, name in sorted(rows, key=lambda it: (list(PEERS).index(it[0]), round(size[it], 2))):
        cells = []
        for figures in models.values():
            found = [it for it in figures if (it["peer"], it["name"]) == (peer, name)]
            cells.append(f"{found[0]['bits_per_weight']:.2f}, {plain(found[0]['kl'])}" if found else "")
        lines.append(f"| {peer} | {shown(name)} | " + " | ".join(cells) + " |")
    return lines


def ratios_table(models):
    head = [f"{model}: {peer}" for model in models for peer in ("llama.cpp", "mlx-lm")]
    lines = ["| bits per weight | " + " | ".join(head) + " |", "|---" * (1 + len(head)) + "|"]
    for bits in POINTS:
        cells = []
        for figures in models.values():
            ours = at(frontier(figures, "shardpack"), bits)
            for peer in ("llama.cpp", "mlx-lm"):
                theirs = at(frontier(figures, peer), bits)
                cells.append(f"{ours / theirs:.2f}" if ours and theirs else "no point")
        lines.append(f"| {bits} | " + " | ".join(cells) + " |")
    return lines


def activations_table(models):
    lines = ["| | " + " | ".join(f"{it}: 32 bits, 8 bits" for it in models) + " |", "|---" * (1 + len(models)) + "|"]
    for name in dict.fromkeys(it["name"] for figures in models.values() for it in figures if it["peer"] == "shardpack"):
        cells = []
        for figures in models.values():
            found = [it for it in figures if it["peer"] == "shardpack" and it["name"] == name]
            cells.append(f"{plain(found[0]['kl'])}, {plain(found[0]['kl_8_bit_activations'])}" if found else "")
        lines.append(f"| {shown(name)} | " + " | ".join(cells) + " |")
    return lines


def panel(model, figures, left):
    drawn = [it for it in figures if it["peer"] in PEERS]
    low, high = (f(it["bits_per_weight"] for it in drawn) for f in (min, max))
    bottom, top = (f(math.log10(it["kl"]) for it in drawn) for f in (min, max))
    across = lambda bits: left + LEFT + (bits - low) / (high - low) * (PANEL - LEFT - 16)
    down = lambda kl: TOP + (top - math.log10(kl)) / (top - bottom) * (HEIGHT - TOP - BOTTOM)
    marks = [f'<text x="{left + LEFT}" y="16" font-weight="bold">{model}: KL divergence from 16 bits</text>']
    for bits in range(math.ceil(low), math.floor(high) + 1):
        marks.append(f'<path d="M{across(bits):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#d0d7de"/>')
        marks.append(f'<text x="{across(bits):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{bits}</text>')
    for power in range(math.ceil(bottom), math.floor(top) + 1):
        y = down(10.0**power)
        marks.append(f'<path d="M{left + LEFT} {y:.1f}H{left + PANEL - 16}" stroke="#d0d7de"/>')
        marks.append(f'<text x="{left + LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for at_, (peer, colour) in enumerate(PEERS.items()):
        line = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in frontier(figures, peer))
        marks.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        for it in drawn:
            if it["peer"] == peer:
                place = f'cx="{across(it["bits_per_weight"]):.1f}" cy="{down(it["kl"]):.1f}"'
                marks.append(f'<circle {place} r="3" fill="{colour}"><title>{peer} {it["name"]}</title></circle>')
        marks.append(f'<text x="{left + LEFT + 84 * at_}" y="34" fill="{colour}">{peer}</text>')
    return marks


def drawing(models):
    width = PANEL * len(models)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif"',
        'font-size="12">',
        "<title>KL divergence from 16 bits against bits per weight</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for number, (model, figures) in enumerate(models.items()):
        lines += panel(model, figures, number * PANEL)
    lines.append(f'<text x="{width / 2}" y="{HEIGHT - 4}" text-anchor="middle">bits per weight</text></svg>')
    return "\n".join(lines) + "\n"


def main(out, *files):
    models = {Path(it).parent.name: json.loads(Path(it).read_text()) for it in files}
    tables = [figures_table(models), ratios_table(models), activations_table(models)]
    Path(f"{out}.md").write_text("\n\n".join("\n".join(it) for it in tables) + "\n")
    Path(f"{out}.svg").write_text(drawing(models))
    print(Path(f"{out}.md").read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
