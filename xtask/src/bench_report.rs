//! `cargo xtask bench-report`: tables and pictures of what `nvfp4-moe bench --json` measured, beside its peers.

mod chart;
mod page;
mod table;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use nvfp4_moe::measurement::{Measurement, Peers};

use crate::process;

/// Arguments of `bench-report`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arguments {
    /// What `nvfp4-moe bench --json` printed.
    bench: PathBuf,
    /// What `tests/peers/peers.py` wrote on the same GPU.
    #[arg(long, value_name = "FILE")]
    peers: Option<PathBuf>,
    /// Replace the marked regions of docs/performance.md and README.md, and write docs/bench-SHAPE.svg, instead of
    /// printing the tables.
    #[arg(long)]
    write: bool,
}

/// Runs the verb.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let measured = load(&arguments.bench, arguments.peers.as_deref())?;
    if !arguments.write {
        print!("{}", table::details(&measured));
        return Ok(());
    }
    for path in write(&process::workspace_root(), &measured)? {
        println!("wrote {path}");
    }
    Ok(())
}

/// A measurement and what it is compared with.
#[derive(Clone, Debug)]
struct Compared {
    measured: Measurement,
    peers: Option<Peers>,
}

/// Reads both files, and checks that they belong together.
fn load(bench: &Path, peers: Option<&Path>) -> Result<Compared> {
    let mut measured = Measurement::read(bench)?;
    for shape in &measured.shapes {
        let name = &shape.shape;
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || ".-_".contains(c)) {
            bail!(
                "{} has a shape {name:?}, but a name must be letters, digits, points and dashes, since a picture is \
                 called by it; name it as nvfp4-moe bench does",
                bench.display()
            );
        }
    }
    if measured.shapes.iter().all(|shape| shape.rows.is_empty()) {
        bail!("{} holds no times; run nvfp4-moe bench with at least one shape and number of tokens", bench.display());
    }
    let peers = match peers {
        None => None,
        Some(path) => {
            let peers = Peers::read(path)?;
            if measured.machine.gpu.as_deref() != Some(peers.gpu.as_str()) {
                bail!(
                    "{} is of {:?}, but {} is of {:?}; measure both on the same GPU",
                    path.display(),
                    peers.gpu,
                    bench.display(),
                    measured.machine.gpu.as_deref().unwrap_or(&measured.machine.name)
                );
            }
            Some(peers)
        }
    };
    let rate = peers.as_ref().and_then(|peers| peers.matmul_tflop_per_s);
    if let (None, Some(rate)) = (measured.ceilings.matmul_tflop_per_s, rate) {
        measured.set_matmul_rate(rate.best);
    }
    Ok(Compared { measured, peers })
}

/// Name of a shape's picture, seen from docs/performance.md.
fn picture(shape: &str) -> String {
    format!("bench-{shape}.svg")
}

/// Writes pages and pictures; their paths. Nothing is written if a page has no place for it.
fn write(root: &Path, compared: &Compared) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for (name, generated) in
        [("docs/performance.md", table::details(compared)), ("README.md", table::overview(compared))]
    {
        let path = root.join(name);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        files.push((name.to_owned(), page::with_region(name, &text, &generated)?));
    }
    for shape in compared.measured.shapes.iter().filter(|shape| !shape.rows.is_empty()) {
        files.push((format!("docs/{}", picture(&shape.shape)), chart::svg(compared, shape)));
    }
    for (name, text) in &files {
        let path = root.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(files.into_iter().map(|(name, _)| name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> PathBuf {
        process::workspace_root().join("xtask/fixtures").join(name)
    }

    /// The measurement of xtask/fixtures, with or without peers.
    pub(super) fn compared(with_peers: bool) -> Compared {
        let peers = fixture("peers.json");
        load(&fixture("bench.json"), with_peers.then_some(peers.as_path())).unwrap()
    }

    /// A directory of its own for a test, in the build directory.
    fn directory(test: &str) -> PathBuf {
        let dir = process::target_dir(&process::workspace_root()).join("tmp").join(format!("bench-report-{test}"));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(dir.join("docs")).unwrap();
        dir
    }

    #[test]
    fn the_peers_give_the_dense_rate() {
        assert_eq!(compared(false).measured.ceilings.matmul_tflop_per_s, None);
        let compared = compared(true);
        assert_eq!(compared.measured.ceilings.matmul_tflop_per_s, Some(800.0));
        // 48 GFLOP at 800 TFLOP/s.
        assert_eq!(compared.measured.shapes[0].rows[1].floors.matmul_us, Some(60.0));
    }

    #[test]
    fn files_that_do_not_fit_are_named() {
        let dir = directory("files");
        let (bench, peers) = (dir.join("b.json"), dir.join("p.json"));
        let text = fs::read_to_string(fixture("bench.json")).unwrap();
        let failed = |text: &str, peers: Option<&Path>| {
            fs::write(&bench, text).unwrap();
            format!("{:#}", load(&bench, peers).unwrap_err())
        };
        for (text, parts) in [
            ("{\"format\": ", ["b.json is damaged", "EOF"]),
            ("{\"rows\": []}", ["format of no name", "nvfp4-moe bench --json"]),
            (&text.replace("\"touched_bytes\": 40000000.0,", ""), ["b.json is damaged", "touched_bytes"]),
            (
                &text.replace("\"layer_us\": 40.0", "\"layer_us\": -40.0"),
                ["layer_us of small-1 with 4 tokens = -40", "above 0"],
            ),
            (&text.replace("small-1", "../small"), ["shape \"../small\"", "letters, digits"]),
        ] {
            let error = failed(text, None);
            assert!(parts.iter().all(|part| error.contains(part)), "{parts:?} are not in: {error}");
        }
        let others = fs::read_to_string(fixture("peers.json")).unwrap().replace("A GPU", "Another GPU");
        fs::write(&peers, others).unwrap();
        let error = failed(&text, Some(&peers));
        assert!(error.contains("\"Another GPU\"") && error.contains("same GPU"), "{error}");
        let error = format!("{:#}", load(&fixture("bench.json"), Some(&fixture("bench.json"))).unwrap_err());
        assert!(error.contains("nvfp4-moe peers 1") && error.contains("peers.py"), "{error}");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn pages_and_pictures_are_written_or_nothing_is() {
        let dir = directory("write");
        let (performance, readme) = (dir.join("docs/performance.md"), dir.join("README.md"));
        fs::write(&performance, "a\n<!-- bench:begin -->\noutdated\n<!-- bench:end -->\nb\n").unwrap();
        fs::write(&readme, "no place\n").unwrap();
        let error = format!("{:#}", write(&dir, &compared(true)).unwrap_err());
        assert!(error.contains("README.md has no line <!-- bench:begin -->"), "{error}");
        assert!(fs::read_to_string(&performance).unwrap().contains("outdated"), "nothing was written");
        fs::write(&readme, "<!-- bench:begin -->\n<!-- bench:end -->").unwrap();
        let written = write(&dir, &compared(true)).unwrap();
        assert_eq!(written, ["docs/performance.md", "README.md", "docs/bench-small-1.svg"]);
        let text = fs::read_to_string(&performance).unwrap();
        assert!(text.starts_with("a\n<!-- bench:begin -->\n") && text.ends_with("<!-- bench:end -->\nb\n"), "{text}");
        assert!(text.contains("(bench-small-1.svg)") && !text.contains("outdated"), "{text}");
        // Again: the same.
        write(&dir, &compared(true)).unwrap();
        assert_eq!(fs::read_to_string(&performance).unwrap(), text);
        assert!(fs::read_to_string(dir.join("docs/bench-small-1.svg")).unwrap().starts_with("<svg "));
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_pages_of_this_project_have_a_place() {
        for name in ["docs/performance.md", "README.md"] {
            let text = fs::read_to_string(process::workspace_root().join(name)).unwrap();
            page::with_region(name, &text, "x\n").unwrap();
        }
    }
}
