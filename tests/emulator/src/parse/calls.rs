//! Device functions (PTX ISA 7.1, 9.7.12.5 `call`, 9.7.12.6 `ret`, 11.2.2 `.func`): a call becomes the function's body with
//! names of its own, in which `ret` is a jump behind it. So there is no recursion and no call by address.

use std::collections::HashMap;

use super::ast::{Formal, FunctionAst, InstructionAst, KernelAst, Operand, RegisterDeclaration, Statement, Variable};
use super::body::{rename_all, rename_operand};
use super::lexer::wrong;
use super::{Parser, Space};
use crate::error::EmulatorError;
use crate::types::Type;

/// Expanded calls of a kernel, beyond which it counts as recursive.
const MOST: u32 = 4096;

impl Parser {
    /// After `.func`; none for a declaration without a body.
    pub(super) fn function(&mut self) -> Result<Option<FunctionAst>, EmulatorError> {
        let mut formals = self.formals(true)?;
        let name = self.word("a function's name")?;
        formals.extend(self.formals(false)?);
        while !self.is('{') && !self.is(';') {
            self.word("a body or `;`")?;
        }
        if self.skip(';') {
            return Ok(None);
        }
        self.sign('{')?;
        let (mut registers, mut variables) = (Vec::new(), Vec::new());
        let statements = self.body(&mut registers, &mut variables)?;
        Ok(Some(FunctionAst { name, formals, registers, variables, statements }))
    }

    fn formals(&mut self, returned: bool) -> Result<Vec<Formal>, EmulatorError> {
        let mut formals = Vec::new();
        if !self.skip('(') {
            return Ok(formals);
        }
        while !self.skip(')') {
            let formal = match self.word("`.param` or `.reg`")?.as_str() {
                ".param" => {
                    let name = self.variable(Space::Param, false)?.name;
                    Formal { name, register: None, returned }
                }
                ".reg" => {
                    let kind = self.word("a type")?;
                    Formal { name: self.word("a name")?, register: Some(kind[1..].into()), returned }
                }
                _ => return self.wrong("`.param` or `.reg`"),
            };
            formals.push(formal);
            self.skip(',');
        }
        Ok(formals)
    }
}

/// Replaces all calls by what they call.
pub(super) fn expand(kernels: &mut [KernelAst], functions: &[FunctionAst]) -> Result<(), EmulatorError> {
    for kernel in kernels {
        let mut calls = 0;
        loop {
            let is_call = |statement: &Statement| matches!(statement, Statement::Instruction(instruction) if instruction.opcode.split('.').next() == Some("call"));
            let Some(at) = kernel.statements.iter().position(is_call) else { break };
            let Statement::Instruction(call) = kernel.statements.remove(at) else { break };
            calls += 1;
            if calls > MOST {
                return Err(wrong(call.line, "calls that end", "recursion"));
            }
            let body = inline(&call, calls, functions, &mut kernel.registers, &mut kernel.variables)?;
            kernel.statements.splice(at..at, body);
        }
        // A parameter in local memory is read and written there.
        let local: Vec<&str> =
            kernel.variables.iter().filter(|v| v.space == Space::Local).map(|v| v.name.as_str()).collect();
        for statement in &mut kernel.statements {
            let Statement::Instruction(instruction) = statement else { continue };
            let is_local = instruction.operands.iter().any(
                |operand| matches!(operand, Operand::Address { base: Some(name), .. } if local.contains(&name.as_str())),
            );
            for space in [".param::func", ".param"] {
                if is_local && instruction.opcode.contains(space) {
                    instruction.opcode = instruction.opcode.replacen(space, ".local", 1);
                }
            }
        }
    }
    Ok(())
}

fn instruction(line: u32, guard: Option<(String, bool)>, opcode: &str, operands: Vec<Operand>) -> Statement {
    Statement::Instruction(InstructionAst { line, guard, opcode: opcode.into(), operands })
}

/// The statements of one call.
fn inline(
    call: &InstructionAst,
    number: u32,
    functions: &[FunctionAst],
    registers: &mut Vec<RegisterDeclaration>,
    variables: &mut Vec<Variable>,
) -> Result<Vec<Statement>, EmulatorError> {
    let refused = |expected: &str, found: &str| wrong(call.line, expected, found);
    if !matches!(call.opcode.as_str(), "call" | "call.uni") {
        return Err(refused("call or call.uni", &call.opcode));
    }
    let mut operands = call.operands.iter().peekable();
    let mut actuals = Vec::new();
    if let Some(Operand::List(returned)) = operands.peek() {
        actuals.extend(returned.clone());
        operands.next();
    }
    let Some(Operand::Name(name)) = operands.next() else {
        return Err(refused("a function's name", "another operand"));
    };
    if let Some(Operand::List(given)) = operands.next() {
        actuals.extend(given.clone());
    }
    if operands.next().is_some() {
        return Err(refused("a direct call", "a list of call targets"));
    }
    let function = functions.iter().find(|function| function.name == *name);
    let function = function.ok_or_else(|| refused("a function of the module", &format!("`{name}`")))?;
    if function.formals.len() != actuals.len() {
        let found = format!("{} arguments", actuals.len());
        return Err(refused(&format!("{} arguments of {name}", function.formals.len()), &found));
    }
    let suffix = format!("@call{number}");
    let end = format!("{name}{suffix}");
    let (mut inner_registers, mut statements) = (function.registers.clone(), function.statements.clone());
    for statement in &mut statements {
        if let Statement::Instruction(inner) = statement
            && matches!(inner.opcode.as_str(), "ret" | "ret.uni")
        {
            let opcode = if inner.guard.is_some() { "bra" } else { "bra.uni" };
            *statement = instruction(inner.line, inner.guard.take(), opcode, vec![Operand::Name(end.clone())]);
        }
    }
    // Register parameters are copied, those in the parameter space are the caller's variables.
    let (mut before, mut after, mut aliases) = (Vec::new(), Vec::new(), HashMap::new());
    for (formal, actual) in function.formals.iter().zip(actuals) {
        match (&formal.register, actual) {
            (None, Operand::Name(variable)) => {
                aliases.insert(formal.name.clone(), variable);
            }
            (Some(kind), actual) => {
                inner_registers.push(RegisterDeclaration {
                    name: formal.name.clone(),
                    kind: kind.clone(),
                    count: None,
                });
                let bits = Type::named(kind).map_or(0, Type::bits);
                let opcode = if bits == 1 { "mov.pred".to_owned() } else { format!("mov.b{bits}") };
                let inner = Operand::Name(format!("{}{suffix}", formal.name));
                if formal.returned {
                    after.push(instruction(call.line, None, &opcode, vec![actual, inner]));
                } else {
                    before.push(instruction(call.line, None, &opcode, vec![inner, actual]));
                }
            }
            _ => return Err(refused("a variable in the parameter space", "another argument")),
        }
    }
    for statement in &mut statements {
        if let Statement::Instruction(inner) = statement {
            inner.operands.iter_mut().for_each(|operand| rename_operand(&aliases, operand));
        }
    }
    rename_all(&suffix, inner_registers, function.variables.clone(), &mut statements, registers, variables);
    let mut body = Vec::new();
    let behind = format!("{end}@behind");
    if let Some((guard, negated)) = &call.guard {
        body.push(instruction(call.line, Some((guard.clone(), !negated)), "bra", vec![Operand::Name(behind.clone())]));
    }
    body.extend(before);
    body.extend(statements);
    body.push(Statement::Label(end));
    body.extend(after);
    body.push(Statement::Label(behind));
    Ok(body)
}
