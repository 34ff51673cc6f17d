//! What kinds of instructions there are.

use serde::{Deserialize, Serialize};

/// What an instruction is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Category {
    /// The tensor cores.
    Matrix,
    SharedLoad,
    GlobalLoad,
    /// From global to shared memory, past the registers.
    AsyncCopy,
    SharedStore,
    /// Integers, bits, predicates and moves, of threads and of warps (the uniform ones).
    Integer,
    /// Arithmetic and conversions.
    Float,
    Control,
    /// Barriers, and waiting for memory.
    Sync,
    Other,
}

const NAMES: [(Category, &[&str]); 8] = [
    (Category::SharedLoad, &["LDS", "LDSM"]),
    (Category::GlobalLoad, &["LD", "LDG"]),
    (Category::AsyncCopy, &["LDGSTS", "LDGDEPBAR", "ARRIVES", "UBLKCP", "UTMALDG"]),
    (Category::SharedStore, &["STS", "STSM"]),
    (
        Category::Integer,
        &[
            "BMSK",
            "BREV",
            "CS2R",
            "FLO",
            "IABS",
            "IADD",
            "IADD3",
            "IDP",
            "IMAD",
            "IMNMX",
            "IMUL",
            "ISCADD",
            "ISETP",
            "LEA",
            "LOP",
            "LOP3",
            "MOV",
            "P2R",
            "PLOP3",
            "POPC",
            "PRMT",
            "R2P",
            "R2UR",
            "S2R",
            "S2UR",
            "SEL",
            "SGXT",
            "SHF",
            "SHL",
            "SHR",
            "VABSDIFF",
            "VIADD",
            "VIADDMNMX",
            "VIMNMX",
            "VIMNMX3",
            "UP2UR",
        ],
    ),
    (
        Category::Float,
        &[
            "F2F", "F2FP", "F2I", "F2IP", "FADD", "FADD2", "FCHK", "FFMA", "FFMA2", "FMNMX", "FMNMX3", "FMUL", "FMUL2",
            "FRND", "FSEL", "FSET", "FSETP", "HADD2", "HFMA2", "HMNMX2", "HMUL2", "HSET2", "HSETP2", "I2F", "I2FP",
            "MUFU",
        ],
    ),
    (
        Category::Control,
        &[
            "BRA",
            "BREAK",
            "BRX",
            "BSSY",
            "BSYNC",
            "CALL",
            "ENDCOLLECTIVE",
            "EXIT",
            "JMP",
            "LEPC",
            "NOP",
            "RET",
            "WARPSYNC",
            "YIELD",
        ],
    ),
    (Category::Sync, &["BAR", "CCTL", "DEPBAR", "ERRBAR", "FENCE", "MEMBAR", "NANOSLEEP", "SYNCS", "WARPGROUP"]),
];

impl Category {
    /// Of an instruction by its name, with or without modifiers.
    pub(super) fn of(opcode: &str) -> Self {
        let name = opcode.split('.').next().unwrap_or_default();
        if name.ends_with("MMA") {
            return Self::Matrix;
        }
        let named = |name: &str| NAMES.iter().find(|(_, names)| names.contains(&name)).map(|&(category, _)| category);
        // `U` is the same for the whole warp.
        named(name).or_else(|| named(name.strip_prefix('U')?)).unwrap_or(Self::Other)
    }

    /// For people.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Matrix => "matrix",
            Self::SharedLoad => "shared load",
            Self::GlobalLoad => "global load",
            Self::AsyncCopy => "async copy",
            Self::SharedStore => "shared store",
            Self::Integer => "integer",
            Self::Float => "float",
            Self::Control => "control",
            Self::Sync => "sync",
            Self::Other => "other",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modifiers_and_uniform_ones_are_the_same_kind() {
        for (opcode, category) in [
            ("HMMA.16816.F32", Category::Matrix),
            ("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", Category::Matrix),
            ("HGMMA.64x8x16.F32", Category::Matrix),
            ("LDSM.16.M88.4", Category::SharedLoad),
            ("LDG.E.128", Category::GlobalLoad),
            ("LDGSTS.E.BYPASS.128", Category::AsyncCopy),
            ("STS.128", Category::SharedStore),
            ("LOP3.LUT", Category::Integer),
            ("UMOV", Category::Integer),
            ("HADD2.F32", Category::Float),
            ("BRA.U.ANY", Category::Control),
            ("SYNCS.PHASECHK.TRANS64.TRYWAIT", Category::Sync),
            ("LDCU.64", Category::Other),
            ("STG.E", Category::Other),
            ("FFMA", Category::Float),
        ] {
            assert_eq!(Category::of(opcode), category, "{opcode}");
        }
    }

    #[test]
    fn no_name_has_two_kinds() {
        let mut names: Vec<&str> = NAMES.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
