//! A drawing (SVG) of KL divergence, on a logarithmic axis, against bits per weight.

use std::fmt::Write as _;

use super::report::Row;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 480.0;
/// The plot's edges: room for labels at the left and below.
const LEFT: f64 = 80.0;
const RIGHT: f64 = WIDTH - 24.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = HEIGHT - 64.0;

/// Width of a character and height of a line of labels, in points of the drawing.
const CHARACTER: f64 = 7.2;
const LINE: f64 = 15.0;

/// A set on the plot.
struct Point<'a> {
    name: &'a str,
    bits: f64,
    kl: f64,
}

/// Where values lie.
struct Axes {
    bits: [f64; 2],
    /// Powers of ten.
    kl: [f64; 2],
}

impl Axes {
    fn of(points: &[Point<'_>]) -> Self {
        let range = |value: fn(&Point<'_>) -> f64| {
            let least = points.iter().map(value).fold(f64::INFINITY, f64::min);
            let most = points.iter().map(value).fold(f64::NEG_INFINITY, f64::max);
            if least <= most { [least, most] } else { [1.0, 1.0] }
        };
        let ([fewest, most], [least, largest]) = (range(|it| it.bits), range(|it| it.kl.log10()));
        let kl = [(least + 1e-9).floor(), (largest - 1e-9).ceil()];
        let kl = if kl[0] < kl[1] { kl } else { [kl[0], kl[0] + 1.0] };
        Self { bits: [(fewest - 0.25).floor().max(0.0), (most + 0.25).ceil()], kl }
    }

    fn x(&self, bits: f64) -> f64 {
        LEFT + (bits - self.bits[0]) / (self.bits[1] - self.bits[0]) * (RIGHT - LEFT)
    }

    fn y(&self, log: f64) -> f64 {
        BOTTOM - (log - self.kl[0]) / (self.kl[1] - self.kl[0]) * (BOTTOM - TOP)
    }
}

/// The drawing.
pub(super) fn svg(rows: &[Row]) -> String {
    let point = |row: &Row| -> Option<(f64, f64)> {
        Some((row.bits_per_weight, row.kl()?)).filter(|it| it.1 > 0.0)
    };
    let points: Vec<_> = rows
        .iter()
        .filter_map(|row| point(row).map(|(bits, kl)| Point { name: &row.name, bits, kl }))
        .collect();
    let absent: Vec<_> =
        rows.iter().filter(|row| point(row).is_none()).map(|row| row.name.as_str()).collect();
    draw(&points, &absent)
}

fn draw(points: &[Point<'_>], absent: &[&str]) -> String {
    let axes = Axes::of(points);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n"
    );
    let middle = f64::midpoint(LEFT, RIGHT);
    text(
        &mut svg,
        [middle, 24.0],
        "middle",
        "KL divergence from the reference, by bits per weight",
    );
    grid(&mut svg, &axes);
    text(&mut svg, [middle, BOTTOM + 38.0], "middle", "bits per weight, everything counted");
    let (x, y) = (20.0, f64::midpoint(TOP, BOTTOM));
    // Writing to a string cannot fail, here and below.
    let _ = writeln!(
        svg,
        "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\" transform=\"rotate(-90 {x} {y})\">mean KL \
         divergence (nats)</text>"
    );
    labelled(&mut svg, &axes, points);
    if !absent.is_empty() {
        let line = format!("not drawn, no divergence: {}", absent.join(", "));
        text(&mut svg, [LEFT, HEIGHT - 8.0], "start", &line);
    }
    svg.push_str("</svg>\n");
    svg
}

/// Lines and numbers of both axes.
fn grid(svg: &mut String, axes: &Axes) {
    let mut line = |from: [f64; 2], to: [f64; 2], colour: &str| {
        let _ = writeln!(
            svg,
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\"/>",
            from[0], from[1], to[0], to[1]
        );
    };
    let mut numbers = Vec::new();
    let wide = axes.kl[1] - axes.kl[0] > 3.0;
    for decade in axes.kl[0] as i32..=axes.kl[1] as i32 {
        for step in [1.0, 2.0, 5.0] {
            let log = f64::from(decade) + f64::log10(step);
            if log > axes.kl[1] + 1e-9 || (step > 1.0 && wide) {
                continue;
            }
            let y = axes.y(log);
            line([LEFT, y], [RIGHT, y], if step > 1.0 { "#eee" } else { "#ccc" });
            let digits = usize::try_from(-decade).unwrap_or(0);
            let number = format!("{:.digits$}", step * 10_f64.powi(decade));
            numbers.push(([LEFT - 8.0, y + 4.0], "end", number));
        }
    }
    let step = ((axes.bits[1] - axes.bits[0]) / 12.0).ceil().max(1.0);
    let mut bits = axes.bits[0];
    while bits <= axes.bits[1] {
        let x = axes.x(bits);
        line([x, TOP], [x, BOTTOM], "#eee");
        numbers.push(([x, BOTTOM + 18.0], "middle", format!("{bits}")));
        bits += step;
    }
    line([LEFT, BOTTOM], [RIGHT, BOTTOM], "#333");
    line([LEFT, TOP], [LEFT, BOTTOM], "#333");
    for (at, anchor, number) in numbers {
        text(svg, at, anchor, &number);
    }
}

/// Points with their names, which lie on no other name.
fn labelled(svg: &mut String, axes: &Axes, points: &[Point<'_>]) {
    let mut taken: Vec<[f64; 3]> = Vec::new();
    for point in points {
        let [x, y] = [axes.x(point.bits), axes.y(point.kl.log10())];
        let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"#06c\"/>");
        let width = point.name.chars().count() as f64 * CHARACTER;
        let left = x + 8.0 + width > RIGHT;
        let start = if left { x - 8.0 - width } else { x + 8.0 };
        let overlaps = |it: &[f64; 3], line: f64| {
            start < it[1] && it[0] < start + width && (line - it[2]).abs() < LINE
        };
        let near = [0.0, -1.0, 1.0, -2.0, 2.0, -3.0, 3.0].map(|lines| y + 4.0 + lines * LINE);
        let free = |line: &&f64| !taken.iter().any(|it| overlaps(it, **line));
        let line = near.iter().find(free).copied().unwrap_or(y + 4.0);
        taken.push([start, start + width, line]);
        let (anchor, at) = if left { ("end", x - 8.0) } else { ("start", x + 8.0) };
        text(svg, [at, line], anchor, point.name);
    }
}

fn text(svg: &mut String, [x, y]: [f64; 2], anchor: &str, text: &str) {
    let mut escaped = String::new();
    for c in text.chars().filter(|c| !c.is_control()) {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            c => escaped.push(c),
        }
    }
    let _ =
        writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{escaped}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn point(name: &str, bits: f64, kl: f64) -> Point<'_> {
        Point { name, bits, kl }
    }

    /// The `attribute` of every element whose line begins with `tag`.
    fn values(svg: &str, tag: &str, attribute: &str) -> Vec<f64> {
        let value = |line: &str| {
            let (_, rest) = line.split_once(&format!(" {attribute}=\""))?;
            rest.split_once('"')?.0.parse().ok()
        };
        svg.lines().filter(|line| line.starts_with(tag)).filter_map(value).collect()
    }

    #[test]
    fn points_lie_where_their_values_are() {
        let svg = draw(&[point("4", 4.5, 0.1), point("6", 6.5, 0.01), point("8", 8.5, 0.001)], &[]);
        let (x, y) = (values(&svg, "<circle", "cx"), values(&svg, "<circle", "cy"));
        assert!((x[1] - x[0] - (x[2] - x[1])).abs() < 0.2, "bits are linear: {x:?}");
        assert!((y[1] - y[0] - (y[2] - y[1])).abs() < 0.2, "KL is logarithmic: {y:?}");
        assert!((y[0] - TOP).abs() < 0.2 && (y[2] - BOTTOM).abs() < 0.2, "{y:?}");
        for number in [">0.1<", ">0.01<", ">0.001<", ">0.005<", ">4<", ">9<"] {
            assert!(svg.contains(number), "{number}");
        }
    }

    #[test]
    fn names_lie_apart_and_inside() {
        let name = "a-name-of-a-set-that-is-long";
        let mut points = Vec::from([1.0, 1.01, 1.02, 1.03].map(|kl| point(name, 16.0, kl)));
        points.push(point("4", 4.0, 2.0));
        let svg = draw(&points, &[]);
        let lines: Vec<&str> = svg.lines().filter(|line| line.contains(name)).collect();
        assert!(lines.len() == 4 && lines.iter().all(|line| line.contains("\"end\"")));
        let mut y: Vec<_> = lines.iter().map(|line| values(line, "<text", "y")[0]).collect();
        y.sort_by(f64::total_cmp);
        assert!(y.windows(2).all(|two| two[1] - two[0] > LINE - 1.0), "{y:?}");
    }

    #[test]
    fn what_cannot_be_drawn_is_said_and_names_are_text() {
        let svg = draw(&[], &["a<b>&c"]);
        assert!(svg.contains("not drawn, no divergence: a&lt;b&gt;&amp;c"), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
