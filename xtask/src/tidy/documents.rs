//! Rules for Markdown files: a file that a document names is there.

use super::File;

/// What breaks a rule; `exists` takes a path from the workspace's root.
pub(super) fn check(file: &File, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    let mut in_block = false;
    for (at, line) in file.text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
            continue;
        }
        // Blocks hold commands with the reader's own paths.
        if in_block {
            continue;
        }
        let mut missing = |name: &str, path: &str| {
            if !exists(path) {
                found.push(format!("{}:{}: there is no {name}", file.path, at + 1));
            }
        };
        let here = file.path.rsplit_once('/').map_or("", |(dir, _)| dir);
        for link in links(line) {
            if let Some(path) = joined(here, link) {
                missing(link, &path);
            }
        }
        for name in code_spans(line).filter(|name| is_path(name)) {
            missing(name, name.trim_end_matches('/'));
        }
    }
    found
}

/// The targets of the links in a line, without anchors; not those of other sites.
fn links(line: &str) -> impl Iterator<Item = &str> {
    let targets = line.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
    targets
        .filter(|target| !target.contains("://") && !target.starts_with("mailto:"))
        .map(|target| target.split('#').next().unwrap_or_default())
        .filter(|target| !target.is_empty())
}

fn code_spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// Whether a code span names a file or directory of the workspace: it starts with one of the top directories, or is a
/// document or manifest at the root. Patterns and placeholders are none.
fn is_path(span: &str) -> bool {
    let is_name = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    if span.is_empty() || !span.chars().all(is_name) {
        return false;
    }
    let tops = ["device/", "host/", "xtask/", "tests/", "docs/", "benches/", ".ci/", ".cargo/"];
    tops.iter().any(|top| span.starts_with(top)) || (!span.contains('/') && span.ends_with(".md"))
}

/// `link` as seen from the directory `here`, from the root; nothing if it leaves the workspace.
fn joined(here: &str, link: &str) -> Option<String> {
    let mut parts: Vec<&str> = here.split('/').filter(|part| !part.is_empty()).collect();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        let there = ["host/src/plan.rs", "docs/performance.md", "README.md", "host"];
        check(&File { path: path.to_owned(), text: text.to_owned() }, |path| there.contains(&path))
    }

    #[test]
    fn links_are_seen_from_the_document() {
        assert!(found("README.md", "see [it](docs/performance.md#h200), [site](https://a.example/x)").is_empty());
        assert!(found("docs/performance.md", "[up](../README.md) [here](performance.md) [top](#top)").is_empty());
        assert_eq!(found("README.md", "a\n[gone](docs/gone.md)"), ["README.md:2: there is no docs/gone.md"]);
        assert_eq!(found("docs/performance.md", "[x](README.md)").len(), 1);
    }

    #[test]
    fn paths_in_backticks_are_seen_from_the_root() {
        assert!(
            found("docs/performance.md", "`host/src/plan.rs`, `host/`, `cargo xtask ci`, `a/b`, `tests/*`").is_empty()
        );
        assert_eq!(found("README.md", "`host/src/gone.rs`"), ["README.md:1: there is no host/src/gone.rs"]);
        assert_eq!(found("README.md", "`GONE.md`").len(), 1);
    }

    #[test]
    fn blocks_are_left_alone() {
        assert!(found("README.md", "```\n`host/gone`\n```").is_empty());
    }
}
