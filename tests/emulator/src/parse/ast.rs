//! What a module says, before anything is looked up.

/// A module.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ast {
    /// `.target`, the first word.
    pub target: String,
    /// Variables of the module's scope.
    pub variables: Vec<Variable>,
    /// Entry points. Calls are expanded in them.
    pub kernels: Vec<KernelAst>,
}

/// A device function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionAst {
    /// Name.
    pub name: String,
    /// Return parameters in order, then the others.
    pub formals: Vec<Formal>,
    /// Registers of the body.
    pub registers: Vec<RegisterDeclaration>,
    /// Variables of the body.
    pub variables: Vec<Variable>,
    /// Labels and instructions.
    pub statements: Vec<Statement>,
}

/// A formal parameter of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Formal {
    /// Name.
    pub name: String,
    /// Type of a register; none in the parameter space.
    pub register: Option<String>,
    /// The function returns it.
    pub returned: bool,
}

/// A state space that variables are declared in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// `.param`
    Param,
    /// `.shared`
    Shared,
    /// `.local`
    Local,
    /// `.global`
    Global,
    /// `.const`
    Const,
}

/// A variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    /// Name.
    pub name: String,
    /// Where it lives.
    pub space: Space,
    /// Alignment in bytes.
    pub align: u64,
    /// Size in bytes; 0 for an array of unknown size.
    pub bytes: u64,
    /// Initial bytes; shorter than `bytes` where the rest is zero.
    pub data: Vec<u8>,
    /// `.extern`: for shared memory, the dynamic part.
    pub external: bool,
}

/// An entry point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelAst {
    /// Name.
    pub name: String,
    /// Parameters in order.
    pub params: Vec<Variable>,
    /// Registers.
    pub registers: Vec<RegisterDeclaration>,
    /// Variables of the body.
    pub variables: Vec<Variable>,
    /// Labels and instructions.
    pub statements: Vec<Statement>,
    /// `.maxntid` or `.reqntid`, 0 where there is none.
    pub max_threads: u32,
    /// `.minnctapersm`, 0 where there is none.
    pub min_blocks: u32,
    /// `.maxnreg`, 0 where there is none.
    pub max_registers: u32,
    /// `.reqnctapercluster`
    pub cluster: Option<u32>,
    /// `.explicitcluster`
    pub explicit_cluster: bool,
    /// `.maxclusterrank`, 0 where there is none.
    pub max_cluster: u32,
}

impl KernelAst {
    /// Registers of a thread at launch: `.maxnreg`, or what of 65,536 is there for each thread of as many blocks as shall
    /// be on a multiprocessor; none where no directive says how many threads there are.
    #[must_use]
    pub fn launch_registers(&self) -> Option<u32> {
        const OF_MULTIPROCESSOR: u32 = 1 << 16;
        const STEP: u32 = 8;
        if self.max_registers != 0 {
            return Some(self.max_registers.next_multiple_of(STEP));
        }
        let threads = self.max_threads.next_multiple_of(32) * self.min_blocks.max(1);
        let most = OF_MULTIPROCESSOR.checked_div(threads)?;
        Some((most / STEP * STEP).min(256))
    }
}

/// One `.reg` name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisterDeclaration {
    /// Name, or what all names begin with.
    pub name: String,
    /// Type, as written.
    pub kind: String,
    /// `name<count>` declares `name0` to `name(count - 1)`.
    pub count: Option<u32>,
}

/// One statement of a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Statement {
    /// A label.
    Label(String),
    /// An instruction.
    Instruction(InstructionAst),
}

/// One instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstructionAst {
    /// Line of the module, from 1.
    pub line: u32,
    /// Guard: register, and whether it is negated.
    pub guard: Option<(String, bool)>,
    /// Opcode with its modifiers.
    pub opcode: String,
    /// Operands in order.
    pub operands: Vec<Operand>,
}

/// One operand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operand {
    /// A register, variable, label, or `_`.
    Name(String),
    /// A variable's address plus a constant.
    NamePlus(String, i64),
    /// `!name`
    Not(String),
    /// `first|second`
    Pair(String, String),
    /// An integer, in two's complement.
    Integer(u64),
    /// `0f` constant.
    Single(u32),
    /// `0d` constant.
    Double(u64),
    /// `{a, b}`
    Vector(Vec<Operand>),
    /// `(a, b)` of a call.
    List(Vec<Operand>),
    /// `[base + offset]`
    Address {
        /// Register or variable; none for an absolute address.
        base: Option<String>,
        /// Bytes.
        offset: i64,
    },
}
