//! From [`crate::parse::ast`] to code that runs: names become slots, labels places, each instruction an object.

mod decoder;
mod order;
mod statement;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub(crate) use decoder::{Decoder, Source};
pub(crate) use statement::{Modifiers, Statement};

use crate::error::EmulatorError;
use crate::execute::{Condition, Execute, Pred, Reg};
use crate::instructions;
use crate::memory::DeviceMemory;
use crate::parse;
use crate::parse::ast::{Ast, KernelAst, Variable};
use order::Item;

/// A decoded instruction.
pub(crate) type Operation = Box<dyn Execute>;

/// Why an instruction cannot be decoded.
pub(crate) struct Refusal(pub(crate) String);

impl<T: Into<String>> From<T> for Refusal {
    fn from(reason: T) -> Self {
        Self(reason.into())
    }
}

/// A loaded PTX module.
#[derive(Debug)]
pub struct Module {
    pub(crate) id: u64,
    lines: Vec<String>,
    kernels: BTreeMap<String, Kernel>,
    variables: Vec<Variable>,
}

/// A decoded kernel.
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) code: Vec<Instruction>,
    pub(crate) registers: Vec<Register>,
    pub(crate) predicates: Vec<Predicate>,
    pub(crate) local_bytes: usize,
    /// Where dynamic shared memory begins in the shared window.
    pub(crate) dynamic_shared: u32,
    pub(crate) param_bytes: usize,
    pub(crate) max_threads: u32,
    /// There are stores of less than 4 bytes, so races are told apart by the byte.
    pub(crate) narrow_stores: bool,
    /// There is something that may order accesses of blocks.
    pub(crate) releases: bool,
    /// There are `wgmma`.
    pub(crate) has_async_products: bool,
    /// Registers of a thread at launch, where a directive says enough to know.
    /// Blocks of a cluster, where a directive says it.
    pub(crate) cluster: Option<u32>,
    /// The launch must say how many blocks a cluster has, if no directive does; and at most so many.
    pub(crate) explicit_cluster: bool,
    pub(crate) max_cluster: u32,
    pub(crate) launch_registers: Option<u32>,
}

/// A general register.
pub(crate) struct Register {
    pub(crate) name: String,
    pub(crate) initial: Initial,
}

/// A predicate register.
pub(crate) struct Predicate {
    pub(crate) name: String,
    pub(crate) constant: Option<bool>,
}

/// What a register holds when a warp begins: constants and special registers are registers that are never written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Initial {
    /// Nothing.
    None,
    Constant(u64),
    /// Address of a variable of the module.
    Variable {
        index: usize,
        offset: i64,
    },
    Special(Special),
}

/// Special registers (PTX ISA 10) that do not change while a thread runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    ClusterId(usize),
    NumberOfClusters(usize),
    ClusterCtaid(usize),
    ClusterNctaid(usize),
    ClusterCtaRank,
    ClusterNctaRank,
    LaneId,
    WarpId,
    NumberOfWarps,
    LanemaskEq,
    LanemaskLt,
    LanemaskLe,
    LanemaskGt,
    LanemaskGe,
    DynamicSharedBytes,
}

/// One place of the code.
pub(crate) struct Instruction {
    pub(crate) guard: Option<Condition>,
    pub(crate) operation: Operation,
    pub(crate) line: u32,
    /// Part of the source rather than of the layout.
    pub(crate) counted: bool,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernel").field("name", &self.name).field("instructions", &self.code.len()).finish()
    }
}

impl Kernel {
    pub(crate) fn register_name(&self, register: Reg) -> &str {
        &self.registers[register.0 as usize].name
    }

    pub(crate) fn predicate_name(&self, register: Pred) -> &str {
        &self.predicates[register.0 as usize].name
    }
}

impl Module {
    /// Reads and decodes a module.
    ///
    /// # Errors
    /// [`EmulatorError::Syntax`] and [`EmulatorError::UnknownInstruction`].
    pub fn parse(ptx: &str) -> Result<Self, EmulatorError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let ast = parse::parse(ptx)?;
        let lines: Vec<String> = ptx.lines().map(|line| line.trim().to_owned()).collect();
        let mut kernels = BTreeMap::new();
        for kernel in &ast.kernels {
            kernels.insert(kernel.name.clone(), decode(&ast, kernel, &lines)?);
        }
        let global = ast.variables.into_iter().filter(decoder::is_global).collect();
        Ok(Self { id: NEXT.fetch_add(1, Relaxed), lines, kernels, variables: global })
    }

    /// Names of the entry points.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.kernels.keys().map(String::as_str)
    }

    pub(crate) fn kernel(&self, name: &str) -> Result<&Kernel, EmulatorError> {
        self.kernels.get(name).ok_or_else(|| EmulatorError::NoKernel { kernel: name.into() })
    }

    pub(crate) fn text(&self, line: u32) -> String {
        self.lines.get((line as usize).wrapping_sub(1)).cloned().unwrap_or_default()
    }

    /// Allocates the module's variables with their initial values.
    pub(crate) fn allocate(&self, memory: &mut DeviceMemory) -> Result<Vec<u64>, EmulatorError> {
        let mut addresses = Vec::new();
        for variable in &self.variables {
            let address = memory.alloc(variable.bytes as usize);
            // Variables without an initial value are zero.
            memory.fill(address, 0, variable.bytes as usize)?;
            memory.write(address, &variable.data)?;
            if variable.space == parse::ast::Space::Const {
                memory.protect(address);
            }
            addresses.push(address);
        }
        Ok(addresses)
    }
}

fn decode(ast: &Ast, kernel: &KernelAst, lines: &[String]) -> Result<Kernel, EmulatorError> {
    let unknown = |line: u32, Refusal(reason): Refusal| EmulatorError::UnknownInstruction {
        kernel: kernel.name.clone(),
        line,
        text: lines.get((line as usize).wrapping_sub(1)).cloned().unwrap_or_default(),
        reason,
    };
    let layout = order::layout(&kernel.statements).map_err(|reason| unknown(0, Refusal(reason)))?;
    let mut decoder = Decoder::new(ast, kernel, layout.labels).map_err(|refusal| unknown(0, refusal))?;
    let mut code = Vec::new();
    for item in layout.items {
        let (guard, operation, line, counted) = match item {
            Item::Jump(target) => (None, instructions::jump(target), 0, false),
            Item::End => (None, instructions::end(), 0, false),
            Item::Statement(index) => {
                let parse::ast::Statement::Instruction(instruction) = &kernel.statements[index] else {
                    unreachable!("labels are not laid out")
                };
                let refused = |refusal| unknown(instruction.line, refusal);
                let guard = instruction.guard.as_ref().map(|(name, negated)| decoder.condition(name, *negated));
                let guard = guard.transpose().map_err(refused)?;
                let mut statement = Statement::new(instruction);
                let operation = instructions::decode(&mut decoder, &mut statement).map_err(refused)?;
                statement.finish().map_err(refused)?;
                (guard, operation, instruction.line, true)
            }
        };
        code.push(Instruction { guard, operation, line, counted });
    }
    Ok(decoder.finish(kernel, code))
}
