//! What can be wrong with one instruction: the kinds of mutations, for the instructions of every architecture.

use super::statement::Statement;

/// A kind of mutation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Kind {
    /// No barrier of a block or of a warp.
    DropBarrier,
    /// No fence.
    DropFence,
    /// No waiting for asynchronous copies, or one copy too few.
    DropWait,
    /// No group of asynchronous copies.
    DropCommit,
    /// No store, reduction or asynchronous copy.
    DropStore,
    /// Plain accesses in place of atomic or ordered ones.
    RelaxOrder,
    /// Two registers of a matrix fragment exchanged.
    SwapFragment,
    /// The scale registers of a matrix instruction exchanged, or another selector.
    SwapScales,
    /// Another comparison: with or without equality, or the opposite.
    Comparison,
    /// A bound that is one off.
    Bound,
    /// A mask with one bit more or less.
    Mask,
    /// An address that is one access off.
    Offset,
    /// A shift that is one off.
    Shift,
    /// Another constant that is one off.
    Constant,
    /// Operands of a subtraction, division or selection exchanged.
    SwapOperands,
    /// A guard turned around.
    NegateGuard,
    /// `and` in place of `or`, `min` in place of `max`, and the other way round.
    Logic,
    /// Bytes in another order.
    ByteOrder,
    /// Another number of announced or copied bytes.
    ByteCount,
    /// The other parity of an mbarrier's phase.
    Parity,
}

impl Kind {
    /// All, in the order of reports.
    pub(super) const ALL: [Self; 20] = [
        Self::DropBarrier,
        Self::DropFence,
        Self::DropWait,
        Self::DropCommit,
        Self::DropStore,
        Self::RelaxOrder,
        Self::SwapFragment,
        Self::SwapScales,
        Self::Comparison,
        Self::Bound,
        Self::Mask,
        Self::Offset,
        Self::Shift,
        Self::Constant,
        Self::SwapOperands,
        Self::NegateGuard,
        Self::Logic,
        Self::ByteOrder,
        Self::ByteCount,
        Self::Parity,
    ];

    /// Its name in reports.
    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::DropBarrier => "drop barrier",
            Self::DropFence => "drop fence",
            Self::DropWait => "drop wait",
            Self::DropCommit => "drop commit",
            Self::DropStore => "drop store",
            Self::RelaxOrder => "relax order",
            Self::SwapFragment => "swap fragment registers",
            Self::SwapScales => "swap scales",
            Self::Comparison => "comparison",
            Self::Bound => "bound",
            Self::Mask => "mask",
            Self::Offset => "address offset",
            Self::Shift => "shift",
            Self::Constant => "constant",
            Self::SwapOperands => "swap operands",
            Self::NegateGuard => "negate guard",
            Self::Logic => "logic",
            Self::ByteOrder => "byte order",
            Self::ByteCount => "byte count",
            Self::Parity => "parity",
        }
    }
}

/// All mutations of a statement: the kind, and the text in its place.
pub(super) fn mutations(s: &Statement) -> Vec<(Kind, String)> {
    let mut found: Vec<(Kind, String)> = dropped(s).into_iter().map(|kind| (kind, String::new())).collect();
    found.extend(ordering(s));
    found.extend(waits(s));
    found.extend(fragments(s));
    found.extend(comparisons(s));
    found.extend(addresses(s).into_iter().map(|text| (Kind::Offset, text)));
    found.extend(constants(s));
    found.extend(exchanges(s));
    if let Some(guard) = &s.guard {
        let turned = match guard.strip_prefix("@!") {
            Some(register) => format!("@{register}"),
            None => format!("@!{}", &guard[1..]),
        };
        found.push((Kind::NegateGuard, Statement { guard: Some(turned), ..s.clone() }.text()));
    }
    found
}

/// The kind under which the whole statement may go.
fn dropped(s: &Statement) -> Option<Kind> {
    match s.name() {
        "bar" | "barrier" => Some(Kind::DropBarrier),
        "membar" | "fence" => Some(Kind::DropFence),
        "cp" if s.has("wait_group") || s.has("wait_all") => Some(Kind::DropWait),
        "cp" if s.has("commit_group") => Some(Kind::DropCommit),
        "cp" | "st" | "red" | "stmatrix" => Some(Kind::DropStore),
        "mbarrier" if s.has("arrive") || s.has("expect_tx") || s.has("init") => Some(Kind::DropStore),
        _ => None,
    }
}

fn ordering(s: &Statement) -> Vec<(Kind, String)> {
    let relaxed = |opcode: String| vec![(Kind::RelaxOrder, s.with(&opcode, &s.operands))];
    if s.name() == "red" && s.has("global") {
        let kind = s.opcode.rsplit('.').next().unwrap_or("u32");
        return relaxed(format!("st.global.{kind}"));
    }
    let ordered = ["volatile", "acquire", "release", "relaxed", "acq_rel"];
    if !["ld", "st"].contains(&s.name()) || !ordered.iter().any(|order| s.has(order)) {
        return Vec::new();
    }
    let strong = |part: &&str| !ordered.contains(part) && !["cta", "cluster", "gpu", "sys"].contains(part);
    relaxed(s.opcode.split('.').filter(strong).collect::<Vec<_>>().join("."))
}

/// Waiting for less: a later group, the other parity, nothing at all.
fn waits(s: &Statement) -> Vec<(Kind, String)> {
    let mut found = Vec::new();
    if s.has("wait_group") {
        found.extend(replaced(s, 0, |value| value + 1).map(|text| (Kind::DropWait, text)));
    }
    if s.name() == "mbarrier" && (s.has("try_wait") || s.has("test_wait")) {
        let guard = s.guard.as_deref().unwrap_or("");
        found.push((Kind::DropWait, format!("{guard}mov.pred {}, -1;", s.operands[0])));
        if s.has("parity") && s.operands.len() > 2 {
            let mut operands = s.operands.clone();
            operands[2] = "%mutant".to_owned();
            let (parity, wait) = (&s.operands[2], s.with(&s.opcode, &operands));
            found.push((Kind::Parity, format!("{{ .reg .b32 %mutant; xor.b32 %mutant, {parity}, 1; {wait} }}")));
        }
    }
    found
}

/// The names inside of braces.
fn elements(vector: &str) -> Option<Vec<String>> {
    let inner = vector.strip_prefix('{')?.strip_suffix('}')?;
    Some(inner.split(',').map(|element| element.trim().to_owned()).collect())
}

fn fragments(s: &Statement) -> Vec<(Kind, String)> {
    if !matches!(s.name(), "mma" | "wgmma" | "ldmatrix" | "stmatrix" | "ld" | "st") {
        return Vec::new();
    }
    let scaled = s.opcode.contains("block_scale");
    let mut found = Vec::new();
    for (index, operand) in s.operands.iter().enumerate() {
        let Some(elements) = elements(operand) else { continue };
        let kind = if scaled && index > 3 { Kind::SwapScales } else { Kind::SwapFragment };
        for first in 1..elements.len() {
            let mut swapped = elements.clone();
            swapped.swap(first - 1, first);
            if swapped != elements {
                found.push((kind, with_operand(s, index, format!("{{{}}}", swapped.join(", ")))));
            }
        }
        if kind == Kind::SwapScales {
            for (place, element) in elements.iter().enumerate() {
                let mut other = elements.clone();
                if let Ok(selector) = element.parse::<i64>() {
                    other[place] = (selector ^ 1).to_string();
                    found.push((kind, with_operand(s, index, format!("{{{}}}", other.join(", ")))));
                } else if elements.len() > 1 {
                    "%mutant".clone_into(&mut other[place]);
                    let shifted = with_operand(s, index, format!("{{{}}}", other.join(", ")));
                    let text = format!("{{ .reg .b16 %mutant; xor.b16 %mutant, {element}, 1; {shifted} }}");
                    found.push((kind, text));
                }
            }
        }
    }
    // d, a, b, c, scales of a, their selector, scales of b, their selector.
    if scaled && s.operands.len() == 8 {
        let mut operands = s.operands.clone();
        operands.swap(4, 6);
        found.push((Kind::SwapScales, s.with(&s.opcode, &operands)));
    }
    found
}

fn with_operand(s: &Statement, index: usize, operand: String) -> String {
    let mut operands = s.operands.clone();
    operands[index] = operand;
    s.with(&s.opcode, &operands)
}

/// The statement with another integer in the operand, if there is an integer.
fn replaced(s: &Statement, index: usize, change: impl Fn(i64) -> i64) -> Option<String> {
    let value = s.operands.get(index)?.parse::<i64>().ok()?;
    Some(with_operand(s, index, change(value).to_string()))
}

fn comparisons(s: &Statement) -> Vec<(Kind, String)> {
    if !matches!(s.name(), "setp" | "set") {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (from, to) in [
        ("lt", ["le", "ge"]),
        ("le", ["lt", "gt"]),
        ("gt", ["ge", "le"]),
        ("ge", ["gt", "lt"]),
        ("geu", ["gtu", "ltu"]),
        ("ltu", ["leu", "geu"]),
        ("gtu", ["geu", "leu"]),
        ("leu", ["ltu", "gtu"]),
        ("eq", ["ne", ""]),
        ("ne", ["eq", ""]),
    ] {
        if s.has(from) {
            for to in to.into_iter().filter(|to| !to.is_empty()) {
                let opcode = s.opcode.replacen(&format!(".{from}."), &format!(".{to}."), 1);
                found.push((Kind::Comparison, s.with(&opcode, &s.operands)));
            }
        }
    }
    for change in [1, -1] {
        for index in 1..s.operands.len() {
            found.extend(replaced(s, index, |value| value + change).map(|text| (Kind::Bound, text)));
        }
    }
    found
}

/// Bytes of one access of a statement that has an address; 0 where it is not known.
fn access_bytes(s: &Statement) -> i64 {
    if s.name() == "ldmatrix" || s.name() == "stmatrix" || s.name() == "cp" {
        return 16;
    }
    let bits = s.opcode.rsplit('.').next().map_or("", |kind| kind.trim_start_matches(|c: char| c.is_alphabetic()));
    let count = if s.has("v4") {
        4
    } else if s.has("v2") {
        2
    } else {
        1
    };
    bits.parse::<i64>().unwrap_or(0) / 8 * count
}

/// One access more or less in an address.
fn addresses(s: &Statement) -> Vec<String> {
    if !matches!(s.name(), "ld" | "st" | "red" | "atom" | "cp" | "ldmatrix" | "stmatrix") {
        return Vec::new();
    }
    let bytes = access_bytes(s);
    let mut found = Vec::new();
    for (index, operand) in s.operands.iter().enumerate() {
        let Some(inner) = operand.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) else { continue };
        let (base, offset) = inner.split_once('+').unwrap_or((inner, "0"));
        let Ok(offset) = offset.parse::<i64>() else { continue };
        for change in [bytes, -bytes].into_iter().filter(|&change| change != 0) {
            let place = offset + change;
            // A parameter has nothing before its first byte.
            if place >= 0 || base.starts_with('%') {
                found.push(with_operand(s, index, format!("[{base}+{place}]")));
            }
        }
    }
    found
}

fn constants(s: &Statement) -> Vec<(Kind, String)> {
    let near = |kind: Kind, index: usize| {
        [1, -1].into_iter().filter_map(move |change| Some((kind, replaced(s, index, |value| value + change)?)))
    };
    let mut found = Vec::new();
    match s.name() {
        "and" | "or" | "xor" => {
            // The lowest bit that the mask has, and the one above its highest.
            for index in 1..s.operands.len() {
                found.extend(replaced(s, index, |mask| mask & mask.wrapping_sub(1)).map(|text| (Kind::Mask, text)));
                let wider = |mask: i64| mask | (mask.unsigned_abs() + 1).next_power_of_two() as i64;
                found.extend(replaced(s, index, wider).map(|text| (Kind::Mask, text)));
            }
            let unchanged = s.text();
            found.retain(|(_, text)| *text != unchanged);
        }
        "shl" | "shr" | "shf" => found.extend(near(Kind::Shift, s.operands.len() - 1)),
        "prmt" => {
            for change in [0x1, 0x10, 0x1000] {
                found.extend(replaced(s, 3, |order| order ^ change).map(|text| (Kind::ByteOrder, text)));
            }
        }
        "cp" if s.operands.len() > 2 => found.extend(near(Kind::ByteCount, s.operands.len() - 1)),
        "mbarrier" if s.has("expect_tx") => {
            let last = s.operands.len() - 1;
            for change in [16, -16] {
                found.extend(replaced(s, last, |bytes| bytes + change).map(|text| (Kind::ByteCount, text)));
            }
            if s.operands[last].starts_with('%') {
                let mut operands = s.operands.clone();
                let bytes = std::mem::replace(&mut operands[last], "%mutant".to_owned());
                let expect = s.with(&s.opcode, &operands);
                let text = format!("{{ .reg .b32 %mutant; add.u32 %mutant, {bytes}, 16; {expect} }}");
                found.push((Kind::ByteCount, text));
            }
        }
        "mov" if s.has("pred") => {
            found.extend(replaced(s, 1, |value| if value == 0 { -1 } else { 0 }).map(|text| (Kind::Constant, text)));
        }
        "add" | "sub" | "mul" | "mad" | "min" | "max" | "mov" | "bfe" | "bfi" | "div" | "rem" | "selp" | "fma"
        | "shfl" | "mbarrier" => {
            for index in 1..s.operands.len() {
                found.extend(near(Kind::Constant, index));
                // Twice or half of a number.
                if let Some(bits) = s.operands[index].strip_prefix("0f").and_then(|x| u32::from_str_radix(x, 16).ok()) {
                    let other = format!("0f{:08X}", bits ^ 0x0080_0000);
                    found.push((Kind::Constant, with_operand(s, index, other)));
                }
            }
        }
        _ => {}
    }
    found
}

fn exchanges(s: &Statement) -> Vec<(Kind, String)> {
    let mut found = Vec::new();
    if matches!(s.name(), "sub" | "div" | "selp" | "rem") && s.operands[1] != s.operands[2] {
        let mut operands = s.operands.clone();
        operands.swap(1, 2);
        found.push((Kind::SwapOperands, s.with(&s.opcode, &operands)));
    }
    for (from, to) in [("and.pred", "or.pred"), ("or.pred", "and.pred")] {
        if s.opcode == from {
            found.push((Kind::Logic, s.with(to, &s.operands)));
        }
    }
    for (from, to) in [("min", "max"), ("max", "min")] {
        if s.has(from) {
            let opcode = s.opcode.replacen(from, to, 1);
            found.push((Kind::Logic, s.with(&opcode, &s.operands)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::statement::statements;
    use super::*;

    fn texts(instruction: &str) -> Vec<(Kind, String)> {
        let ptx = format!(".visible .entry k(\n)\n{{\n\t{instruction}\n}}\n");
        mutations(&statements(&ptx)[0])
    }

    #[track_caller]
    fn has(instruction: &str, kind: Kind, text: &str) {
        let found = texts(instruction);
        assert!(found.contains(&(kind, text.to_owned())), "{found:?}");
    }

    #[test]
    fn portable_instructions() {
        has("bar.sync 0;", Kind::DropBarrier, "");
        has("cp.async.wait_group 3;", Kind::DropWait, "cp.async.wait_group 4;");
        has("cp.async.commit_group;", Kind::DropCommit, "");
        has("@%p1 st.b32 [%rd1], %r2;", Kind::DropStore, "");
        has("@%p1 st.b32 [%rd1], %r2;", Kind::NegateGuard, "@!%p1 st.b32 [%rd1], %r2;");
        has("red.global.max.u32 [%rd1], %r1;", Kind::RelaxOrder, "st.global.u32 [%rd1], %r1;");
        has("ld.volatile.global.u32 %r1, [%rd1];", Kind::RelaxOrder, "ld.global.u32 %r1, [%rd1];");
        has("ldmatrix.sync.x2 {%r1, %r2}, [%r3];", Kind::SwapFragment, "ldmatrix.sync.x2 {%r2, %r1}, [%r3];");
        has("setp.lt.u32 %p1, %r1, 8;", Kind::Comparison, "setp.le.u32 %p1, %r1, 8;");
        has("setp.lt.u32 %p1, %r1, 8;", Kind::Bound, "setp.lt.u32 %p1, %r1, 7;");
        has("and.b32 %r1, %r2, 31;", Kind::Mask, "and.b32 %r1, %r2, 63;");
        has("and.b32 %r1, %r2, 31;", Kind::Mask, "and.b32 %r1, %r2, 30;");
        has(
            "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];",
            Kind::Offset,
            "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1+-16];",
        );
        has("ld.param.b64 %rd1, [k_param_0];", Kind::Offset, "ld.param.b64 %rd1, [k_param_0+8];");
        has("shl.b32 %r1, %r2, 5;", Kind::Shift, "shl.b32 %r1, %r2, 6;");
        has("add.s32 %r1, %r2, -1;", Kind::Constant, "add.s32 %r1, %r2, 0;");
        has("mul.rn.f32 %r1, %r2, 0f3F800000;", Kind::Constant, "mul.rn.f32 %r1, %r2, 0f3F000000;");
        has("sub.s32 %r1, %r2, %r3;", Kind::SwapOperands, "sub.s32 %r1, %r3, %r2;");
        has("prmt.b32 %r1, %r2, %r3, 4112;", Kind::ByteOrder, "prmt.b32 %r1, %r2, %r3, 4113;");
    }

    #[test]
    fn instructions_of_newer_architectures() {
        let wait = "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2;";
        has(wait, Kind::DropWait, "mov.pred %p1, -1;");
        assert!(
            texts(wait).iter().any(|(kind, text)| *kind == Kind::Parity && text.contains("xor.b32 %mutant, %r2, 1"))
        );
        has("fence.proxy.async;", Kind::DropFence, "");
        let expect = |bytes| format!("mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {bytes};");
        has(&expect(64), Kind::ByteCount, &expect(80));
        let mma = |scales: &str| {
            format!(
                "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 {{%r1}}, {{%r2}}, {{%r3}}, {{%r4}}, {scales};"
            )
        };
        has(&mma("%r5, {0, 1}, %r6, {0, 0}"), Kind::SwapScales, &mma("%r6, {0, 1}, %r5, {0, 0}"));
        has(&mma("%r5, {0, 1}, %r6, {0, 0}"), Kind::SwapScales, &mma("%r5, {0, 0}, %r6, {0, 0}"));
        has(&mma("{%r5}, {0, 1}, {%r6}, {0, 0}"), Kind::SwapScales, &mma("{%r5}, {0, 1}, {%r6}, {1, 0}"));
        let shifted = mma("%r5, {%rs1, %mutant}, %r6, {%rs1, %rs1}");
        has(
            &mma("%r5, {%rs1, %rs2}, %r6, {%rs1, %rs1}"),
            Kind::SwapScales,
            &format!("{{ .reg .b16 %mutant; xor.b16 %mutant, %rs2, 1; {shifted} }}"),
        );
        has("mbarrier.init.shared::cta.b64 [%r1], %r2;", Kind::DropStore, "");
    }
}
