//! The kernel of one instruction: a thread a case.

use std::fmt::Write as _;

use super::inputs::Kind;

/// Names of the operands in the tables' instructions.
const OUTPUTS: [&str; 4] = ["%d", "%e", "%f", "%g"];
const INPUTS: [&str; 5] = ["%a", "%b", "%c", "%x", "%y"];

/// Version and target lines.
pub(super) fn header(architecture: u32) -> String {
    match architecture {
        ..=90 => format!(".version 8.1\n.target sm_{architecture}\n.address_size 64\n"),
        _ => format!(".version 8.7\n.target sm_{architecture}a\n.address_size 64\n"),
    }
}

/// Version and target lines for what only sm_90 has (`sm_90a`).
pub(super) const SM_90A: &str = ".version 8.7\n.target sm_90a\n.address_size 64\n";

/// A module whose kernel applies `instruction` to each case.
pub(super) fn module(architecture: u32, instruction: &str, outputs: &[Kind], inputs: &[Kind]) -> String {
    let mut text = header(architecture);
    text.push_str(
        ".visible .entry k(.param .align 8 .b8 args[24])\n{\n.reg .pred %end;\n.reg .b16 %half;\n\
         .reg .b32 %index, %count, %word;\n.reg .b64 %in, %out, %at;\n",
    );
    for (name, kind) in OUTPUTS.iter().zip(outputs).chain(INPUTS.iter().zip(inputs)) {
        let register = match kind.bits() {
            1 => "pred".to_owned(),
            bits => format!("b{bits}"),
        };
        let _ = writeln!(text, ".reg .{register} {name};");
    }
    let _ = write!(
        text,
        "ld.param.b64 %in, [args];\nld.param.b64 %out, [args+8];\nld.param.b32 %count, [args+16];\n\
         mov.u32 %index, %ctaid.x;\nmov.u32 %word, %ntid.x;\nmul.lo.u32 %index, %index, %word;\nmov.u32 %word, %tid.x;\n\
         add.u32 %index, %index, %word;\nsetp.ge.u32 %end, %index, %count;\n@%end bra DONE;\n\
         mul.wide.u32 %at, %index, {};\nadd.u64 %in, %in, %at;\nmul.wide.u32 %at, %index, {};\nadd.u64 %out, %out, %at;\n",
        8 * inputs.len(),
        8 * outputs.len(),
    );
    for (i, (name, kind)) in INPUTS.iter().zip(inputs).enumerate() {
        let at = 8 * i;
        let _ = match kind.bits() {
            1 => writeln!(text, "ld.global.b32 %word, [%in+{at}];\nsetp.ne.u32 {name}, %word, 0;"),
            8 => writeln!(text, "ld.global.b16 %half, [%in+{at}];\nmov.b16 {{{name}, _}}, %half;"),
            bits => writeln!(text, "ld.global.b{bits} {name}, [%in+{at}];"),
        };
    }
    let _ = writeln!(text, "{instruction}");
    for (i, (name, kind)) in OUTPUTS.iter().zip(outputs).enumerate() {
        let at = 8 * i;
        let _ = match kind.bits() {
            1 => writeln!(text, "selp.u32 %word, 1, 0, {name};\nst.global.b32 [%out+{at}], %word;"),
            8 => writeln!(text, "mov.b16 %half, {{{name}, 0}};\nst.global.b16 [%out+{at}], %half;"),
            bits => writeln!(text, "st.global.b{bits} [%out+{at}], {name};"),
        };
    }
    text.push_str("DONE:\nret;\n}\n");
    text
}
