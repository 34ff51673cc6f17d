//! A picture of one shape's table: tokens to the right, layer time upwards, both on logarithmic axes. SVG, written here.

use nvfp4_moe::measurement::ShapeTimes;

use super::Compared;

const WIDTH: f64 = 820.0;
const HEIGHT: f64 = 460.0;
/// The rectangle of the axes; the legend is at its right.
const LEFT: f64 = 66.0;
const RIGHT: f64 = 590.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 400.0;

/// Colours for light and dark pages: ours, the floor, then the peers.
const COLOURS: [[&str; 2]; 7] = [
    ["#0550ae", "#6cb6ff"],
    ["#57606a", "#adbac7"],
    ["#b35900", "#f69d50"],
    ["#1a7f37", "#6bc46d"],
    ["#8250df", "#dcbdfb"],
    ["#bf3989", "#fc8dc7"],
    ["#7d4e00", "#daaa3f"],
];

/// One line: its name, and (tokens, microseconds) in ascending order.
#[derive(Clone, Debug, PartialEq)]
struct Series {
    name: String,
    points: Vec<(f64, f64)>,
}

/// The picture.
pub(super) fn svg(compared: &Compared, shape: &ShapeTimes) -> String {
    let series = series_of(compared, shape);
    let values = |axis: fn(&(f64, f64)) -> f64| {
        let all: Vec<f64> = series.iter().flat_map(|line| &line.points).map(axis).collect();
        (all.iter().copied().fold(f64::INFINITY, f64::min), all.iter().copied().fold(0.0, f64::max))
    };
    let (tokens, times) = (values(|point| point.0), values(|point| point.1));
    let ticks = ticks(times);
    let x = Axis::new(tokens, (LEFT, RIGHT));
    let y = Axis::new((ticks[0], ticks[ticks.len() - 1]), (BOTTOM, TOP));
    let on = compared.measured.machine.gpu.as_deref().unwrap_or(&compared.measured.machine.name);

    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         role=\"img\" font-family=\"sans-serif\" font-size=\"11\">\n<style>\n{}</style>\n\
         <rect class=\"page\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>\n",
        style()
    );
    svg += &text((LEFT, 22.0), "start\" font-size=\"14", &format!("{}, {on}: time of the layer", shape.shape));
    for &tick in &ticks {
        let at = y.at(tick);
        svg += &format!("<line class=\"grid\" x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{RIGHT}\" y2=\"{at:.1}\"/>\n");
        svg += &text((LEFT - 6.0, at + 4.0), "end", &tick.to_string());
    }
    for row in &shape.rows {
        let at = x.at(row.tokens as f64);
        svg += &format!("<line class=\"grid\" x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{BOTTOM}\"/>\n");
        svg += &text((at, BOTTOM + 16.0), "middle", &row.tokens.to_string());
    }
    svg += &text(((LEFT + RIGHT) / 2.0, BOTTOM + 38.0), "middle", "tokens");
    svg += &text((LEFT - 6.0, TOP - 8.0), "end", "us");
    for (at, line) in series.iter().enumerate() {
        let class = at.min(COLOURS.len() - 1);
        let points: Vec<_> = line.points.iter().map(|&(tokens, us)| (x.at(tokens), y.at(us))).collect();
        let path: Vec<_> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        svg += &format!("<polyline class=\"line s{class}\" points=\"{}\"/>\n", path.join(" "));
        for (x, y) in points {
            svg += &format!("<circle class=\"dot s{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\"/>\n");
        }
        let (left, middle) = (RIGHT + 18.0, TOP + 12.0 + 22.0 * at as f64);
        svg += &format!(
            "<line class=\"line s{class}\" x1=\"{left}\" y1=\"{middle}\" x2=\"{}\" y2=\"{middle}\"/>\n",
            left + 26.0
        );
        svg += &text((left + 34.0, middle + 4.0), "start", &line.name);
    }
    svg + "</svg>\n"
}

/// Ours, the floor, and every peer that measured some of the same.
fn series_of(compared: &Compared, shape: &ShapeTimes) -> Vec<Series> {
    let measured = &compared.measured;
    let floor = match measured.ceilings.matmul_tflop_per_s {
        Some(_) => "floor: reading or dense product",
        None => "floor: reading alone",
    };
    let mut rows: Vec<_> = shape.rows.iter().collect();
    rows.sort_by_key(|row| row.tokens);
    let tokens = |at: usize| rows[at].tokens as f64;
    let mut all = vec![
        Series {
            name: "nvfp4-moe".to_owned(),
            points: rows.iter().enumerate().map(|(at, row)| (tokens(at), row.layer_us)).collect(),
        },
        Series {
            name: floor.to_owned(),
            points: rows.iter().enumerate().map(|(at, row)| (tokens(at), row.floors.us())).collect(),
        },
    ];
    for peer in compared.peers.iter().flat_map(|peers| &peers.peers) {
        let time = |row: usize| Some((tokens(row), peer.layer_us(&shape.shape, rows[row].tokens)?));
        let points: Vec<_> = (0..rows.len()).filter_map(time).collect();
        if !points.is_empty() {
            all.push(Series { name: peer.name.clone(), points });
        }
    }
    all
}

/// A logarithmic axis.
#[derive(Clone, Copy, Debug)]
struct Axis {
    least: f64,
    /// Pixels at the least value, and for a factor of e.
    origin: f64,
    scale: f64,
}

impl Axis {
    fn new((least, most): (f64, f64), (from, to): (f64, f64)) -> Self {
        if most > least {
            return Self { least, origin: from, scale: (to - from) / (most / least).ln() };
        }
        // One value stands in the middle.
        Self { least, origin: (from + to) / 2.0, scale: 0.0 }
    }

    fn at(&self, value: f64) -> f64 {
        self.origin + (value / self.least).ln() * self.scale
    }
}

/// 1, 2 and 5 times powers of ten, from below the least to above the most, at least two of them.
fn ticks((least, most): (f64, f64)) -> Vec<f64> {
    let steps = |exponent: i32| {
        [1.0, 2.0, 5.0]
            .map(|step: f64| if exponent < 0 { step / 10f64.powi(-exponent) } else { step * 10f64.powi(exponent) })
    };
    let all: Vec<f64> = ((least.log10().floor() as i32)..=(most.log10().ceil() as i32)).flat_map(steps).collect();
    let first = all.iter().rposition(|tick| *tick <= least).unwrap_or(0);
    let last = all.iter().position(|tick| *tick >= most).unwrap_or(all.len() - 1);
    all[first..=last.max(first + 1).min(all.len() - 1)].to_vec()
}

fn style() -> String {
    let mut style = "text{fill:#1f2328}.page{fill:#ffffff}.grid{stroke:#d1d9e0;stroke-width:0.6}\
                     .line{fill:none;stroke-width:1.6}.s0{stroke-width:2.6}.s1{stroke-dasharray:6 4}.dot{stroke:none}\n"
        .to_owned();
    let colours = |dark: usize| -> String {
        let classes = COLOURS.iter().enumerate();
        classes.map(|(at, both)| format!(".line.s{at}{{stroke:{0}}}.dot.s{at}{{fill:{0}}}", both[dark])).collect()
    };
    style += &format!("{}\n", colours(0));
    style += "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}.page{fill:#0d1117}.grid{stroke:#3d444d}";
    style + &format!("{}}}\n", colours(1))
}

fn text((x, y): (f64, f64), anchor: &str, words: &str) -> String {
    let words = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>\n")
}

#[cfg(test)]
mod tests {
    use super::super::tests::compared;
    use super::*;

    fn picture(with_peers: bool) -> String {
        let compared = compared(with_peers);
        svg(&compared, &compared.measured.shapes[0])
    }

    #[test]
    fn the_picture_has_lines_axes_and_a_legend() {
        let svg = picture(true);
        assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n"), "{svg}");
        for (part, count) in [
            ("<polyline ", 3),
            // Two of ours, two of the floor, one of the peer.
            ("<circle ", 5),
            (">nvfp4-moe</text>", 1),
            (">floor: reading or dense product</text>", 1),
            (">Peer</text>", 1),
            (">small-1, A GPU: time of the layer</text>", 1),
            (">tokens</text>", 1),
            (">us</text>", 1),
            (">1024</text>", 1),
            ("prefers-color-scheme:dark", 1),
        ] {
            assert_eq!(svg.matches(part).count(), count, "{part} in\n{svg}");
        }
        let opened = svg.matches("<text ").count();
        assert_eq!((opened, svg.matches('<').count()), (svg.matches("</text>").count(), svg.matches('>').count()));
    }

    /// From 10 to 2000 microseconds, from 4 to 1024 tokens.
    #[test]
    fn points_are_where_their_logarithms_are() {
        let svg = picture(true);
        let part = |time: f64| BOTTOM - (BOTTOM - TOP) * (time / 10.0).ln() / 200f64.ln();
        for (class, times) in [("s0", [40.0, 1200.0]), ("s1", [10.0, 60.0])] {
            let [first, second] = times.map(part);
            let line =
                format!("<polyline class=\"line {class}\" points=\"{LEFT:.1},{first:.1} {RIGHT:.1},{second:.1}\"/>");
            assert!(svg.contains(&line), "{line} is not in\n{svg}");
        }
        let line = format!("<polyline class=\"line s2\" points=\"{LEFT:.1},{:.1}\"/>", part(60.0));
        assert!(svg.contains(&line), "{line} is not in\n{svg}");
    }

    #[test]
    fn a_missing_ceiling_is_said() {
        let svg = picture(false);
        assert!(svg.contains(">floor: reading alone</text>") && !svg.contains("dense"), "{svg}");
        assert_eq!(svg.matches("<polyline ").count(), 2);
    }

    #[test]
    fn ticks_enclose_all_values() {
        assert_eq!(ticks((10.0, 1200.0)), [10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0]);
        assert_eq!(ticks((0.3, 4.0)), [0.2, 0.5, 1.0, 2.0, 5.0]);
        assert_eq!(ticks((7.0, 7.0)), [5.0, 10.0]);
        assert_eq!(ticks((100.0, 100.0)), [100.0, 200.0]);
    }

    #[test]
    fn names_are_no_markup() {
        assert!(text((0.0, 0.0), "start", "<a> & b").contains(">&lt;a&gt; &amp; b</text>"));
    }

    #[test]
    fn one_number_of_tokens_stands_in_the_middle() {
        let mut compared = compared(false);
        compared.measured.shapes[0].rows.truncate(1);
        let svg = svg(&compared, &compared.measured.shapes[0]);
        assert!(svg.contains(&format!("points=\"{:.1},", (LEFT + RIGHT) / 2.0)) && !svg.contains("NaN"), "{svg}");
    }
}
