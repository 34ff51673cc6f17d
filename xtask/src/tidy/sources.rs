//! Rules for Rust files and cargo manifests.

use super::File;

/// A Rust file has fewer lines than this.
const MAX_LINES: usize = 500;

/// Text that may not stand in the code of some files, and why. Comments do not count.
#[derive(Clone, Copy, Debug)]
struct Rule {
    texts: &'static [&'static str],
    applies: fn(&str) -> bool,
    why: &'static str,
}

const RULES: [Rule; 6] = [
    Rule {
        texts: &["extern \"C\"", "extern \"system\"", "cust::", "cust_raw::", "libloading"],
        applies: |path| !path.starts_with("host/src/driver/") && !is_this_file(path),
        why: "foreign functions are called in host/src/driver only",
    },
    Rule {
        texts: &["cuLaunchKernel"],
        applies: |path| !launches(path) && !is_this_file(path),
        why: LAUNCHES_ELSEWHERE,
    },
    Rule {
        texts: &["crate::driver", "crate::cuda", "driver::", "cuda::", "cust"],
        applies: |path| ["host/src/plan.rs", "host/src/schedule.rs"].contains(&path),
        why: "planning touches no GPU",
    },
    Rule {
        texts: &[".unwrap()", ".expect(", "panic!(", "unreachable!(", " assert!(", " assert_eq!(", " assert_ne!("],
        // Only what the GPU runs; the PTX check finds what is not spelled out, such as indexing.
        applies: |path| path.starts_with("device/src/kernels/") || path.starts_with("device/src/ptx/"),
        why: "device code never panics",
    },
    Rule {
        texts: &["todo!(", "unimplemented!(", "#[ignore", "dbg!("],
        applies: |path| !is_this_file(path),
        why: "what is committed is finished and runs",
    },
    Rule {
        texts: &["static mut ", "lazy_static!", "thread_local!"],
        applies: |path| !is_this_file(path),
        why: "there is no global state",
    },
];

const LAUNCHES_ELSEWHERE: &str = "kernels are launched in host/src/cuda only";

/// Files that launch kernels: the driver module defines it, and its example has a kernel of its own; what the emulator
/// launches it runs itself, and the conformance checks bring their own kernels.
fn launches(path: &str) -> bool {
    let allowed =
        ["host/src/cuda/", "host/src/driver/", "tests/emulator/", "tests/src/emulated.rs", "tests/src/conformance.rs"];
    allowed.iter().any(|start| path.starts_with(start))
}

/// Whether a line launches a driver function: a captured graph's `launch` takes a stream and nothing else, and the one
/// of an engine is host/src/cuda itself.
fn launches_kernel(line: &str) -> bool {
    let parts: Vec<&str> = line.split(".launch(").collect();
    parts.windows(2).any(|pair| {
        let [receiver, rest] = [pair[0], pair[1]];
        if receiver.ends_with("engine") {
            return false;
        }
        let mut depth = 1;
        for c in rest.chars() {
            match c {
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' => depth -= 1,
                ',' if depth == 1 => return true,
                _ => {}
            }
            if depth == 0 {
                return false;
            }
        }
        // The arguments go on in the next line, so there are several.
        true
    })
}

/// The rules' own texts, and their tests, are here.
fn is_this_file(path: &str) -> bool {
    path == "xtask/src/tidy/sources.rs"
}

/// What breaks a rule in a Rust file.
pub(super) fn check(file: &File) -> Vec<String> {
    let path = &file.path;
    let mut found = Vec::new();
    let lines = file.text.lines().count();
    if lines >= MAX_LINES {
        found.push(format!("{path} has {lines} lines; a file has fewer than {MAX_LINES}"));
    }
    if !is_this_file(path) {
        for mark in ["FIXME", "XXX", "TODO"] {
            found.extend(lines_with(&file.text, mark).map(|line| format!("{path}:{line}: {mark} is left")));
        }
    }
    let code = code_of(&file.text);
    if !launches(path) && !is_this_file(path) {
        let kernels = code.lines().enumerate().filter(|(_, line)| launches_kernel(line));
        found.extend(kernels.map(|(at, _)| format!("{path}:{}: {LAUNCHES_ELSEWHERE}", at + 1)));
    }
    for rule in RULES.iter().filter(|rule| (rule.applies)(path)) {
        for text in rule.texts {
            // Several texts of a rule may be in one line; the first says it.
            let said = |line: &usize| !found.iter().any(|x| x.starts_with(&format!("{path}:{line}: ")));
            let broken = lines_with(&code, text).filter(said).collect::<Vec<_>>();
            found.extend(broken.iter().map(|line| format!("{path}:{line}: `{}`: {}", text.trim(), rule.why)));
        }
    }
    found
}

fn lines_with<'a>(text: &'a str, part: &'a str) -> impl Iterator<Item = usize> + 'a {
    text.lines().enumerate().filter(move |(_, line)| line.contains(part)).map(|(at, _)| at + 1)
}

/// The same lines without comments, without checks at compile time (`const` asserts) and without what only tests have.
fn code_of(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut skipped_until: Option<&str> = None;
    let mut test_only = false;
    for line in text.lines() {
        let start = line.trim_start();
        if let Some(end) = skipped_until {
            if line == end {
                skipped_until = None;
            }
        } else if line.starts_with("const _: () = {") {
            skipped_until = Some("};");
        } else if line == "#[cfg(test)]" {
            test_only = true;
        } else if test_only {
            // Further attributes may come before the item.
            test_only = line.starts_with("#[");
            skipped_until = (!test_only && line.ends_with('{')).then_some("}");
        } else if !["//", "const _: () = assert!", "const { assert!"].iter().any(|skip| start.starts_with(skip)) {
            code.push_str(line.split(" // ").next().unwrap_or_default());
        }
        code.push('\n');
    }
    code
}

/// A member's dependency says `workspace = true`: which version, the root's table says.
pub(super) fn check_manifest(file: &File) -> Vec<String> {
    let path = &file.path;
    if path == "Cargo.toml" || !path.ends_with("/Cargo.toml") {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut in_dependencies = false;
    for (at, line) in file.text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.starts_with('[') {
            in_dependencies = line.trim_matches(['[', ']']).ends_with("dependencies");
        } else if in_dependencies && !line.is_empty() && !is_of_workspace(line) {
            found.push(format!(
                "{path}:{}: `{line}`: versions of dependencies are in the workspace's Cargo.toml only",
                at + 1
            ));
        }
    }
    found
}

fn is_of_workspace(dependency: &str) -> bool {
    let plain: String = dependency.split_whitespace().collect();
    plain.contains("workspace=true") && !plain.contains("version=")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        check(&File { path: path.to_owned(), text: text.to_owned() })
    }

    #[test]
    fn every_rule_finds_what_it_is_for() {
        for (path, text, part) in [
            ("host/src/plan.rs", "use crate::driver::Device;", "planning touches no GPU"),
            ("host/src/schedule.rs", "use crate::cuda::Engine;", "planning touches no GPU"),
            ("host/src/forward.rs", "unsafe extern \"C\" fn f() {}", "foreign functions"),
            ("tests/src/lib.rs", "use cust::sys;", "foreign functions"),
            ("host/src/main.rs", "function.launch(grid, block, 0, stream, &params)", "kernels are launched"),
            ("host/src/main.rs", "gemm.launch(", "kernels are launched"),
            ("device/src/kernels/pack.rs", "    x.unwrap()", "never panics"),
            ("host/src/main.rs", "    todo!()", "finished"),
            ("host/src/main.rs", "// FIXME later", "FIXME is left"),
            ("host/src/main.rs", "static mut COUNT: u32 = 0;", "global state"),
        ] {
            let found = found(path, &format!("\n{text}\n"));
            assert_eq!(found.len(), 1, "{text}: {found:?}");
            assert!(found[0].contains(part) && found[0].starts_with(&format!("{path}:2: ")), "{found:?}");
        }
    }

    #[test]
    fn what_is_allowed_is_left_alone() {
        for (path, text) in [
            ("host/src/driver/loader.rs", "use libloading::Library;"),
            ("host/src/cuda/engine.rs", "function.launch(grid, block, 0, stream, &params)"),
            ("host/src/plan.rs", "// what crate::driver allocates"),
            ("device/src/kernels/pack.rs", "const _: () = {\n    assert!(TILE == 8);\n};"),
            ("device/src/kernels/pack.rs", "    const { assert!(TILE % 8 == 0) };"),
            ("device/src/kernels/pack.rs", "#[cfg(test)]\nmod tests {\n    x.unwrap();\n}"),
            ("host/src/a.rs", "#[cfg(test)]\nthread_local! {\n    static X: u32 = 0;\n}"),
            ("host/src/main.rs", "x.unwrap()"),
            ("host/src/main.rs", "graph.launch(stream.handle(0, 1))?;"),
            ("tests/src/lib.rs", "unsafe { engine.launch(&launch, stream.handle())? };"),
        ] {
            assert_eq!(found(path, text), Vec::<String>::new());
        }
    }

    #[test]
    fn long_files_are_named_with_their_length() {
        assert_eq!(found("host/src/a.rs", &"\n".repeat(499)), Vec::<String>::new());
        assert_eq!(
            found("host/src/a.rs", &"\n".repeat(500)),
            ["host/src/a.rs has 500 lines; a file has fewer than 500"]
        );
    }

    #[test]
    fn versions_are_in_the_workspace_table_only() {
        let check =
            |text: &str| check_manifest(&File { path: "host/Cargo.toml".to_owned(), text: text.to_owned() }).len();
        assert_eq!(check("[package]\nversion = \"1\"\n[dependencies]\nhalf.workspace = true\n"), 0);
        assert_eq!(check("[dev-dependencies]\nhalf = { workspace = true, features = [\"x\"] }\n"), 0);
        assert_eq!(check("[dependencies]\nhalf = \"2\"\n"), 1);
        assert_eq!(check("[target.'cfg(unix)'.dependencies]\nhalf = { version = \"2\" }\n[lints]\nx = 1\n"), 1);
    }
}
