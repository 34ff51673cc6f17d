//! What `nvdisasm -c` shows of each kernel: how many instructions, and the loops that feed the tensor cores: those with their
//! instructions, and those that only copy for others.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::category::Category;

/// One kernel's code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Code {
    /// Without the padding behind the last one.
    pub(super) instructions: usize,
    /// Calls of functions that the module does not hold: the driver's.
    pub(super) outside_calls: usize,
    /// Innermost loops with matrix instructions, and those beside them with copies by threads into shared memory, in the
    /// order of the code.
    pub(super) loops: Vec<Loop>,
}

/// A loop from the target of a branch back to that branch. Code on either side of a branch inside counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Loop {
    /// The matrix instructions, each kind once; none in a loop that copies only.
    pub(super) matrix: Vec<String>,
    pub(super) instructions: usize,
    /// How many of each category; what there is none of is missing.
    pub(super) mix: BTreeMap<Category, usize>,
}

impl Loop {
    fn new(body: &[Instruction<'_>]) -> Self {
        let mut mix = BTreeMap::new();
        let mut matrix: Vec<String> = Vec::new();
        for instruction in body {
            let category = Category::of(instruction.opcode);
            *mix.entry(category).or_insert(0) += 1;
            if category == Category::Matrix && !matrix.iter().any(|opcode| opcode == instruction.opcode) {
                matrix.push(instruction.opcode.to_owned());
            }
        }
        matrix.sort_unstable();
        Self { matrix, instructions: body.len(), mix }
    }

    /// Matrix instructions.
    pub(super) fn matrix_count(&self) -> usize {
        self.mix.get(&Category::Matrix).copied().unwrap_or(0)
    }
}

#[derive(Clone, Copy, Debug)]
struct Instruction<'a> {
    opcode: &'a str,
    operands: &'a str,
}

/// The kernels of a listing by name.
pub(super) fn parse(listing: &str) -> Result<BTreeMap<String, Code>> {
    let mut kernels = BTreeMap::new();
    let mut current: Option<(&str, Function<'_>)> = None;
    for line in listing.lines() {
        if let Some(name) = line.strip_prefix(".text.").and_then(|rest| rest.strip_suffix(':')) {
            if let Some((name, function)) = current.replace((name, Function::default())) {
                kernels.insert(name.to_owned(), function.code().with_context(|| format!("in the code of {name}"))?);
            }
        } else if let Some((_, function)) = &mut current {
            function.add(line);
        }
    }
    if let Some((name, function)) = current {
        kernels.insert(name.to_owned(), function.code().with_context(|| format!("in the code of {name}"))?);
    }
    Ok(kernels)
}

#[derive(Debug, Default)]
struct Function<'a> {
    instructions: Vec<Instruction<'a>>,
    /// Label to the number of the instruction behind it.
    labels: BTreeMap<&'a str, usize>,
}

impl<'a> Function<'a> {
    fn add(&mut self, line: &'a str) {
        let line = line.trim();
        if let Some(label) = line.strip_suffix(':') {
            self.labels.insert(label, self.instructions.len());
            return;
        }
        // `/*0040*/  @!P0 BRA `(.L_x_1) ;`
        let Some((_, statement)) = line.strip_prefix("/*").and_then(|rest| rest.split_once("*/")) else {
            return;
        };
        let mut statement = statement.trim();
        // Some are guarded twice: by a predicate of the warp, too.
        while statement.starts_with('@') {
            statement = statement.split_once(' ').map_or("", |(_, rest)| rest.trim_start());
        }
        let statement = statement.trim_end_matches(';').trim_end();
        let (opcode, operands) = statement.split_once(' ').unwrap_or((statement, ""));
        if !opcode.is_empty() {
            self.instructions.push(Instruction { opcode, operands });
        }
    }

    fn code(mut self) -> Result<Code> {
        while self.instructions.last().is_some_and(|last| last.opcode == "NOP") {
            self.instructions.pop();
        }
        let is_outside = |x: &&Instruction<'_>| x.opcode.starts_with("CALL.ABS");
        Ok(Code {
            instructions: self.instructions.len(),
            outside_calls: self.instructions.iter().filter(is_outside).count(),
            loops: self.feeding_loops()?.into_iter().map(|body| Loop::new(&self.instructions[body])).collect(),
        })
    }

    /// Loops with matrix instructions first, shortest first: what overlaps one of them is an outer loop, a loop inside, or
    /// a jump back from code that was moved to the end.
    fn feeding_loops(&self) -> Result<Vec<Range<usize>>> {
        let is_matrix = |x: &Instruction<'_>| Category::of(x.opcode) == Category::Matrix;
        let is_copy = |x: &Instruction<'_>| x.opcode.split('.').next() == Some("LDGSTS");
        let mut ranges = Vec::new();
        for (at, instruction) in self.instructions.iter().enumerate() {
            if instruction.opcode.split('.').next() != Some("BRA") {
                continue;
            }
            let Some(label) = instruction.operands.split('(').nth(1).and_then(|rest| rest.split(')').next()) else {
                continue;
            };
            let target =
                *self.labels.get(label).with_context(|| format!("a branch goes to {label}, which is nowhere"))?;
            if target > at {
                continue;
            }
            let body = &self.instructions[target..=at];
            let multiplies = body.iter().any(is_matrix);
            if multiplies || body.iter().any(is_copy) {
                ranges.push((!multiplies, body.len(), target..at + 1));
            }
        }
        ranges.sort_by_key(|(copies_only, length, _)| (*copies_only, *length));
        let mut innermost: Vec<Range<usize>> = Vec::new();
        for (.., body) in ranges {
            if innermost.iter().all(|inner| body.end <= inner.start || inner.end <= body.start) {
                innermost.push(body);
            }
        }
        innermost.sort_by_key(|body| body.start);
        Ok(innermost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = "\
	.target	sm_90
//--------------------- .text.copies --------------------------
	.section	.text.copies,\"ax\",@progbits
        .size           copies,(.L_x_9 - copies)
copies:
.text.copies:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0020*/              @!P0 BRA `(.L_x_0) ;
        /*0030*/                   EXIT ;
.L_x_1:
        /*0040*/                   BRA `(.L_x_1);
        /*0050*/                   NOP ;
        /*0060*/                   NOP ;
.L_x_9:
//--------------------- .text.multiplies --------------------------
multiplies:
.text.multiplies:
.L_x_2:
        /*0000*/                   MOV R0, 0x1 ;
.L_x_3:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P6, [R81+URZ], R12 ;
        /*0020*/              @!P6 BRA `(.L_x_6) ;
.L_x_4:
        /*0030*/                   LDSM.16.M88.4 R12, [R12] ;
        /*0040*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0050*/                   HMMA.16816.F32 R4, R8, R14, R4 ;
.L_x_7:
        /*0058*/                   LDGSTS.E.128 [R21], desc[UR38][R8.64], P2 ;
        /*005c*/              @!P1 BRA `(.L_x_7) ;
        /*0060*/                   UMOV UR4, 0x4 ;
        /*0070*/               @P0 BRA `(.L_x_3) ;
        /*0080*/               @P1 @UP1 BRA.U `(.L_x_2) ;
.L_x_5:
        /*0090*/                   OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R8, R68, R14, R8, R79, R76, UR4 ;
        /*00a0*/               @P0 BRA `(.L_x_5) ;
        /*00b0*/                   CALL.ABS.NOINC R14 ;
        /*00c0*/                   EXIT ;
.L_x_8:
        /*00cc*/                   LDGSTS.E.128 [R21], desc[UR38][R8.64], P2 ;
        /*00ce*/              @!P1 BRA `(.L_x_8) ;
.L_x_6:
        /*00d0*/                   YIELD ;
        /*00e0*/                   BRA `(.L_x_4) ;
";

    #[test]
    fn padding_is_no_instruction_and_a_loop_that_feeds_nothing_no_main_loop() {
        let kernels = parse(LISTING).unwrap();
        assert_eq!(kernels.keys().collect::<Vec<_>>(), ["copies", "multiplies"]);
        assert_eq!(kernels["copies"], Code { instructions: 5, outside_calls: 0, loops: Vec::new() });
    }

    #[test]
    fn main_loops_are_the_innermost_ones() {
        let code = &parse(LISTING).unwrap()["multiplies"];
        assert_eq!((code.instructions, code.outside_calls), (19, 1));
        // Neither the outer loop from 0000 to 0080, nor the one inside from 0058, nor the way back from 00e0.
        let [first, second, copies] = code.loops.as_slice() else { panic!("{:?}", code.loops) };
        assert_eq!((first.instructions, first.matrix_count()), (9, 2));
        assert_eq!(first.matrix, ["HMMA.16816.F32"]);
        let mix = [
            (Category::Matrix, 2),
            (Category::SharedLoad, 1),
            (Category::Integer, 1),
            (Category::AsyncCopy, 1),
            (Category::Control, 3),
            (Category::Sync, 1),
        ];
        assert_eq!(first.mix, BTreeMap::from(mix));
        assert_eq!((second.instructions, second.matrix_count()), (2, 1));
        let mix = BTreeMap::from([(Category::AsyncCopy, 1), (Category::Control, 1)]);
        assert_eq!(*copies, Loop { matrix: Vec::new(), instructions: 2, mix });
    }

    #[test]
    fn a_branch_to_nowhere_is_an_error() {
        let error = format!("{:#}", parse(".text.x:\n/*0000*/ BRA `(.L_x_7) ;\n").unwrap_err());
        assert!(error.contains("code of x") && error.contains(".L_x_7"), "{error}");
    }
}
