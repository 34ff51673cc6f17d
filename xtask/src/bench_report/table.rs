//! The tables, in Markdown.

use nvfp4_moe::measurement::{Measurement, Peers, Row, ShapeTimes, StageTime};

use super::{Compared, picture};

/// Numbers of tokens that a page for everybody shows, where they were measured.
const FEW_TOKENS: [usize; 4] = [1, 16, 256, 4096];

const NONE: &str = "-";

/// Everything: a table and a picture for each shape.
pub(super) fn details(compared: &Compared) -> String {
    let Compared { measured, peers } = compared;
    let mut text = head(measured, peers.as_ref());
    for shape in measured.shapes.iter().filter(|shape| !shape.rows.is_empty()) {
        let ShapeTimes { shape: name, hidden, intermediate, experts, topk, activation, rows } = shape;
        text += &format!(
            "\n{name} ({hidden} x {intermediate}, {experts} experts, top-k {topk}, {activation}, {} scales)\n\n\
             ![{name}: layer time over tokens]({})\n\n",
            measured.scales,
            picture(name)
        );
        text += &table(compared, shape);
        text += &check(rows);
    }
    text
}

/// What holds for all tables.
fn head(measured: &Measurement, peers: Option<&Peers>) -> String {
    let mut text = format!(
        "Measured by `nvfp4-moe bench` {}, {}, on {}. {} Random routing over all local experts; batches and copies of \
         the weights take turns, so that no cache holds what the next batch reads. Layer times are medians of graph \
         replays. The floor is the larger time of reading the touched NVFP4 bytes and of the FLOPs. Stage times are \
         between events in an eager forward and include a launch each; quantize and combine are compared with the copy \
         ceiling.\n",
        measured.version,
        commit(measured),
        machine(measured),
        ceilings(measured)
    );
    if let Some(peers) = peers {
        let versions: Vec<_> = peers.peers.iter().map(|peer| format!("{} ({})", peer.name, peer.version)).collect();
        text += &format!("\nPeers, on the same GPU: {}.\n", versions.join(", "));
    }
    text
}

fn commit(Measurement { checkout, .. }: &Measurement) -> String {
    let changed = if checkout.changed { " with changes" } else { "" };
    match &checkout.commit {
        Some(commit) => format!("commit {}{changed}", commit.get(..12).unwrap_or(commit)),
        None => "commit unknown".to_owned(),
    }
}

fn machine(Measurement { machine, .. }: &Measurement) -> String {
    let mut text = machine.gpu.clone().unwrap_or_else(|| machine.name.clone());
    if let Some(multiprocessors) = machine.multiprocessors {
        text += &format!(", {multiprocessors} SMs");
    }
    if let Some(driver) = &machine.driver {
        text += &format!(", driver {driver}");
    }
    text
}

fn ceilings(Measurement { ceilings, .. }: &Measurement) -> String {
    let matmul = match ceilings.matmul_tflop_per_s {
        Some(rate) => format!("a dense bf16 product {} TFLOP/s", figure(rate)),
        None => "a dense matmul rate was not given (`--matmul-tflops`, or `--peers`), so that the floor is that of \
                 reading alone"
            .to_owned(),
    };
    format!(
        "Ceilings: reading {:.0} GB/s and copying {:.0} GB/s (read + written), both of the same call; {matmul}.",
        ceilings.read_gb_per_s, ceilings.copy_gb_per_s
    )
}

fn table(compared: &Compared, shape: &ShapeTimes) -> String {
    // Rows may differ in their stages; the longest list has them all.
    let stages: Vec<&str> = shape
        .rows
        .iter()
        .max_by_key(|row| row.stages.len())
        .map_or_else(Vec::new, |row| row.stages.iter().map(|stage| stage.stage.as_str()).collect());
    let peers = compared.peers.iter().flat_map(|peers| &peers.peers).collect::<Vec<_>>();
    let mut head = ["tokens", "floor us", "layer us", "fastest to slowest", "of floor", "GB/s", "of read", "TFLOP/s"]
        .map(str::to_owned)
        .to_vec();
    head.push("of dense".to_owned());
    head.extend(peers.iter().map(|peer| format!("{} us", peer.name)));
    head.extend(stages.iter().map(|stage| (*stage).to_owned()));
    head.push("grouped GEMM".to_owned());
    let mut text = line(&head) + &format!("|{}\n", "---|".repeat(head.len()));
    for row in &shape.rows {
        let [fastest, slowest] = row.layer_us_range;
        let mut cells = vec![
            row.tokens.to_string(),
            figure(row.floors.us()),
            figure(row.layer_us),
            format!("{} to {}", figure(fastest), figure(slowest)),
            percent(row.of_floor()),
            figure(row.gb_per_s()),
            percent(row.of_read()),
            figure(row.tflop_per_s()),
            row.of_matmul().map_or_else(|| NONE.to_owned(), percent),
        ];
        cells.extend(peers.iter().map(|peer| {
            let time = peer.layer_us(&shape.shape, row.tokens);
            time.map_or_else(|| NONE.to_owned(), figure)
        }));
        cells.extend(stages.iter().map(|name| {
            let stage = row.stages.iter().find(|stage| stage.stage == *name);
            stage.map_or_else(|| NONE.to_owned(), stage_cell)
        }));
        cells.push(row.variant.clone().unwrap_or_else(|| NONE.to_owned()));
        text += &line(&cells);
    }
    text
}

fn stage_cell(stage: &StageTime) -> String {
    let of_copy = stage.of_copy.map_or_else(String::new, |part| format!(" ({} of copy)", percent(part)));
    figure(stage.us) + &of_copy
}

/// What the comparison with the CPU engine found.
fn check(rows: &[Row]) -> String {
    let unchecked = rows.iter().filter(|row| row.check_passed.is_none()).count();
    let wrong: Vec<_> =
        rows.iter().filter(|row| row.check_passed == Some(false)).map(|row| row.tokens.to_string()).collect();
    let largest = rows.iter().filter_map(|row| row.check_rel_l2).fold(0.0, f64::max);
    if !wrong.is_empty() {
        return format!("\nWRONG: rows of the batches of {} tokens differ from the CPU engine's.\n", wrong.join(", "));
    }
    match unchecked {
        0 => format!(
            "\nIn the same call up to 4 random rows of each batch were computed again by the CPU engine: relative L2 \
             distance at most {largest:.1e}.\n"
        ),
        _ => format!("\n{unchecked} of {} batches were not compared with the CPU engine.\n", rows.len()),
    }
}

/// The smaller table: few numbers of tokens of all shapes.
pub(super) fn overview(compared: &Compared) -> String {
    let Compared { measured, peers } = compared;
    let mut head = ["shape", "tokens", "microseconds", "of floor", "TFLOP/s"].to_vec();
    if peers.is_some() {
        head.extend(["fastest peer", "times as fast"]);
    }
    let mut text = format!(
        "The layer on {}, {} activation scales, whole forward with quantized activations ({}):\n\n",
        machine(measured),
        measured.scales,
        commit(measured)
    );
    text += &(line(&head) + &format!("|{}\n", "---|".repeat(head.len())));
    for shape in &measured.shapes {
        let few = shape.rows.iter().filter(|row| FEW_TOKENS.contains(&row.tokens)).collect::<Vec<_>>();
        let rows = if few.is_empty() { shape.rows.iter().collect() } else { few };
        for (at, row) in rows.into_iter().enumerate() {
            let ShapeTimes { shape: name, hidden, intermediate, experts, topk, .. } = shape;
            let mut cells = vec![
                match at {
                    0 => format!("{name} ({hidden} x {intermediate}, {experts} experts, top-k {topk})"),
                    _ => String::new(),
                },
                row.tokens.to_string(),
                figure(row.layer_us),
                percent(row.of_floor()),
                figure(row.tflop_per_s()),
            ];
            if let Some(peers) = peers {
                let times = peers.peers.iter().filter_map(|peer| Some((peer.layer_us(name, row.tokens)?, &peer.name)));
                match times.min_by(|(left, _), (right, _)| left.total_cmp(right)) {
                    Some((time, peer)) => {
                        cells.extend([format!("{} ({peer})", figure(time)), format!("{:.2}", time / row.layer_us)]);
                    }
                    None => cells.extend([NONE.to_owned(), NONE.to_owned()]),
                }
            }
            text += &line(&cells);
        }
    }
    text + &format!(
        "\nThe floor is the larger time of reading the NVFP4 bytes of the experts that got a token and of the FLOPs. {}\n",
        ceilings(measured)
    )
}

fn line<S: AsRef<str>>(cells: &[S]) -> String {
    let cells = cells.iter().map(|cell| cell.as_ref().replace('|', "\\|"));
    format!("| {} |\n", cells.collect::<Vec<_>>().join(" | "))
}

/// A time or a rate with three digits or more.
fn figure(value: f64) -> String {
    match value {
        0.0..1.0 => format!("{value:.3}"),
        1.0..1000.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

fn percent(part: f64) -> String {
    format!("{:.0}%", part * 100.0)
}

#[cfg(test)]
mod tests {
    use super::super::tests::compared;
    use super::*;

    #[test]
    fn the_table_has_every_number() {
        let text = details(&compared(true));
        for part in [
            "commit 0123456789ab with changes, on A GPU, 132 SMs, driver 580.159.",
            "reading 4000 GB/s and copying 3000 GB/s",
            "a dense bf16 product 800.0 TFLOP/s.",
            "Peers, on the same GPU: Peer (peer 1.2).",
            "small-1 (1024 x 512, 8 experts, top-k 2, SwiGLU, static scales)",
            "![small-1: layer time over tokens](bench-small-1.svg)",
            "| tokens | floor us | layer us | fastest to slowest | of floor | GB/s | of read | TFLOP/s | of dense | Peer us \
             | route | combine | grouped GEMM |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
            // 40 MB at 4 TB/s are 10 us; 6 GFLOP at 800 TFLOP/s are 7.5 us.
            "| 4 | 10.0 | 40.0 | 39.0 to 42.5 | 25% | 1000 | 25% | 150.0 | 19% | 60.0 | 5.0 | 4.0 (50% of copy) | gemm, 16 \
             x 8 |\n",
            // 48 GFLOP are 60 us.
            "| 1024 | 60.0 | 1200 | 1190 to 1310 | 5% | 66.7 | 2% | 40.0 | 5% | - | 7.0 | - | - |\n",
            "relative L2 distance at most 1.5e-7.",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }

    #[test]
    fn figures_have_three_digits_or_more() {
        assert_eq!([0.0421, 4.25, 999.94, 1000.4].map(figure), ["0.042", "4.2", "999.9", "1000"]);
    }

    #[test]
    fn what_is_missing_is_said() {
        let mut compared = compared(false);
        let text = details(&compared);
        assert!(text.contains("a dense matmul rate was not given (`--matmul-tflops`, or `--peers`)"), "{text}");
        assert!(text.contains("| 1024 | 20.0 | 1200 | 1190 to 1310 | 2% | 66.7 | 2% | 40.0 | - | 7.0 |"), "{text}");
        assert!(!text.contains("Peer"), "{text}");
        let rows = &mut compared.measured.shapes[0].rows;
        (rows[0].check_rel_l2, rows[0].check_passed) = (None, None);
        assert!(details(&compared).contains("1 of 2 batches were not compared"));
        compared.measured.shapes[0].rows[1].check_passed = Some(false);
        assert!(details(&compared).contains("WRONG: rows of the batches of 1024 tokens"));
    }

    #[test]
    fn the_overview_names_the_fastest_peer() {
        let text = overview(&compared(true));
        let rows = "| small-1 (1024 x 512, 8 experts, top-k 2) | 4 | 40.0 | 25% | 150.0 | 60.0 (Peer) | 1.50 |\n\
                    |  | 1024 | 1200 | 5% | 40.0 | - | - |\n";
        assert!(text.contains(rows), "{text}");
        assert!(text.starts_with("The layer on A GPU, 132 SMs, driver 580.159, static"), "{text}");
        let mut compared = compared(false);
        let text = overview(&compared);
        assert!(text.contains("| of floor | TFLOP/s |\n|---|---|---|---|---|\n"), "{text}");
        assert!(text.contains("a dense matmul rate was not given"), "{text}");
        compared.measured.shapes[0].rows[0].tokens = 256;
        let rows = overview(&compared).lines().filter(|line| line.starts_with("| ")).count();
        assert_eq!(rows, 2, "only what everybody measures, where it was measured");
    }
}
