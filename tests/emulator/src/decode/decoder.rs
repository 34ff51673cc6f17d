//! Names and constants of one kernel.

use std::collections::HashMap;

use super::{Initial, Instruction, Kernel, Predicate, Refusal, Register, Special, Statement};
use crate::execute::{Condition, Pred, Reg};
use crate::memory::SHARED_BASE;
use crate::memory::block_clocks::Order;
use crate::memory::global_races::Access;
use crate::parse::ast::{Ast, KernelAst, Operand, RegisterDeclaration, Space, Variable};
use crate::types::{Type, truncate};

/// What the operands of a kernel's instructions are looked up in.
pub(crate) struct Decoder {
    registers: Vec<Register>,
    bits: Vec<u32>,
    predicates: Vec<Predicate>,
    names: HashMap<String, Named>,
    initials: HashMap<Initial, Reg>,
    constant_predicates: [Option<Pred>; 2],
    labels: HashMap<String, u32>,
    local_bytes: u64,
    dynamic_shared: u32,
    param_bytes: u64,
    narrow_stores: bool,
    releases: bool,
    has_async_products: bool,
}

#[derive(Clone, Copy)]
enum Named {
    Register(Reg),
    Predicate(Pred),
    /// Address in its own space.
    Address(u64),
    /// Variable of the module in global memory.
    Global(usize),
}

/// An address operand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) base: Reg,
    pub(crate) offset: i64,
    /// The base has 32 bits.
    pub(crate) narrow: bool,
}

impl Source {
    /// The address, from the base register's value.
    #[inline(always)]
    pub(crate) fn address(self, base: u64) -> u64 {
        let address = base.wrapping_add(self.offset as u64);
        if self.narrow { address & 0xFFFF_FFFF } else { address }
    }
}

pub(super) fn is_global(variable: &Variable) -> bool {
    matches!(variable.space, Space::Global | Space::Const)
}

fn place(end: &mut u64, variable: &Variable) -> u64 {
    let at = end.next_multiple_of(variable.align);
    *end = at + variable.bytes;
    at
}

impl Decoder {
    pub(super) fn new(ast: &Ast, kernel: &KernelAst, labels: HashMap<String, u32>) -> Result<Self, Refusal> {
        let mut decoder = Self {
            registers: Vec::new(),
            bits: Vec::new(),
            predicates: Vec::new(),
            names: HashMap::new(),
            initials: HashMap::new(),
            constant_predicates: [None; 2],
            labels,
            local_bytes: 0,
            dynamic_shared: 0,
            param_bytes: 0,
            narrow_stores: false,
            releases: false,
            has_async_products: false,
        };
        decoder.declare_variables(ast, kernel);
        for declaration in &kernel.registers {
            decoder.declare(declaration)?;
        }
        Ok(decoder)
    }

    fn declare_variables(&mut self, ast: &Ast, kernel: &KernelAst) {
        for (index, variable) in ast.variables.iter().filter(|variable| is_global(variable)).enumerate() {
            self.names.insert(variable.name.clone(), Named::Global(index));
        }
        for param in &kernel.params {
            let at = place(&mut self.param_bytes, param);
            self.names.insert(param.name.clone(), Named::Address(at));
        }
        let (mut shared_end, mut dynamic_align) = (u64::from(SHARED_BASE), 16);
        let mut dynamic = Vec::new();
        for variable in ast.variables.iter().chain(&kernel.variables) {
            match variable.space {
                Space::Shared if variable.external || variable.bytes == 0 => {
                    dynamic_align = dynamic_align.max(variable.align);
                    dynamic.push(&variable.name);
                }
                Space::Shared => {
                    let at = place(&mut shared_end, variable);
                    self.names.insert(variable.name.clone(), Named::Address(at));
                }
                Space::Local => {
                    let at = place(&mut self.local_bytes, variable);
                    self.names.insert(variable.name.clone(), Named::Address(at));
                }
                Space::Global | Space::Const | Space::Param => {}
            }
        }
        // Only as aligned as declared.
        let mut start = shared_end.next_multiple_of(dynamic_align);
        if start % (2 * dynamic_align) == 0 && shared_end > u64::from(SHARED_BASE) {
            start += dynamic_align;
        }
        self.dynamic_shared = start as u32;
        for name in dynamic {
            self.names.insert(name.clone(), Named::Address(start));
        }
    }

    fn declare(&mut self, declaration: &RegisterDeclaration) -> Result<(), Refusal> {
        let kind = Type::named(&declaration.kind).ok_or_else(|| format!("register type .{}", declaration.kind))?;
        let names: Vec<String> = match declaration.count {
            None => vec![declaration.name.clone()],
            Some(count) => (0..count).map(|i| format!("{}{i}", declaration.name)).collect(),
        };
        for name in names {
            let named = if kind == Type::Pred {
                self.predicates.push(Predicate { name: name.clone(), constant: None });
                Named::Predicate(Pred(self.predicates.len() as u32 - 1))
            } else {
                Named::Register(self.new_register(name.clone(), kind.bits(), Initial::None))
            };
            self.names.insert(name, named);
        }
        Ok(())
    }

    fn new_register(&mut self, name: String, bits: u32, initial: Initial) -> Reg {
        self.registers.push(Register { name, initial });
        self.bits.push(bits);
        Reg(self.registers.len() as u32 - 1)
    }

    pub(super) fn finish(self, kernel: &KernelAst, code: Vec<Instruction>) -> Kernel {
        Kernel {
            name: kernel.name.clone(),
            code,
            registers: self.registers,
            predicates: self.predicates,
            local_bytes: self.local_bytes as usize,
            dynamic_shared: self.dynamic_shared,
            param_bytes: self.param_bytes as usize,
            max_threads: kernel.max_threads,
            narrow_stores: self.narrow_stores,
            releases: self.releases,
            has_async_products: self.has_async_products,
            cluster: kernel.cluster,
            explicit_cluster: kernel.explicit_cluster,
            max_cluster: kernel.max_cluster,
            launch_registers: kernel.launch_registers(),
        }
    }

    /// A store of so many bytes exists.
    pub(crate) fn note_store(&mut self, bytes: usize) {
        self.narrow_stores |= bytes < 4;
    }

    /// Such an access exists.
    pub(crate) fn note_access(&mut self, access: Access) {
        if let Access::Strong(order) = access {
            self.note_order(order);
        }
    }

    /// A fence, or an access, of such an order exists.
    pub(crate) fn note_order(&mut self, order: Order) {
        self.releases |= order.releases;
    }

    /// A `wgmma` exists.
    pub(crate) fn note_async_product(&mut self) {
        self.has_async_products = true;
    }

    fn initial(&mut self, initial: Initial) -> Reg {
        if let Some(&register) = self.initials.get(&initial) {
            return register;
        }
        let name = match initial {
            Initial::Constant(value) => format!("the constant {value:#x}"),
            other => format!("{other:?}"),
        };
        let register = self.new_register(name, 64, initial);
        self.initials.insert(initial, register);
        register
    }

    /// A register that holds a constant.
    pub(crate) fn constant(&mut self, value: u64) -> Reg {
        self.initial(Initial::Constant(value))
    }

    fn register(&mut self, name: &str) -> Result<Reg, Refusal> {
        match self.names.get(name) {
            Some(&Named::Register(register)) => Ok(register),
            Some(_) => Err(format!("{name} is no general register").into()),
            None => Err(format!("there is no register {name}").into()),
        }
    }

    fn sized(&mut self, name: &str, kind: Type, wider: bool) -> Result<Reg, Refusal> {
        let register = self.register(name)?;
        let bits = self.bits[register.0 as usize];
        if bits == kind.bits() || wider && bits > kind.bits() {
            Ok(register)
        } else {
            Err(format!("{name} has {bits} bits, the instruction {}", kind.bits()).into())
        }
    }

    /// A source operand: register, constant, special register, or address of a variable.
    pub(crate) fn source(&mut self, statement: &Statement<'_>, index: usize, kind: Type) -> Result<Reg, Refusal> {
        self.source_operand(statement.operand(index)?, kind, false)
    }

    /// As [`Self::source`]; the register may be wider than the type.
    pub(crate) fn wide_source(&mut self, statement: &Statement<'_>, index: usize, kind: Type) -> Result<Reg, Refusal> {
        self.source_operand(statement.operand(index)?, kind, true)
    }

    pub(crate) fn source_operand(&mut self, operand: &Operand, kind: Type, wider: bool) -> Result<Reg, Refusal> {
        let constant = match *operand {
            Operand::Integer(value) if !matches!(kind, Type::F32 | Type::F64) => {
                let bits = kind.bits().min(64);
                let (signed, high) = (value as i64, truncate(value, bits));
                if high != value && crate::types::sign_extend(high, bits) != signed {
                    return Err(format!("the constant {signed} does not fit {bits} bits").into());
                }
                high
            }
            Operand::Single(bits) if matches!(kind, Type::F32 | Type::B32) => u64::from(bits),
            Operand::Double(bits) if matches!(kind, Type::F64 | Type::B64) => bits,
            Operand::Double(bits) if kind == Type::F32 => u64::from((f64::from_bits(bits) as f32).to_bits()),
            Operand::Name(ref name) => return self.named_source(name, 0, kind, wider),
            Operand::NamePlus(ref name, offset) => return self.named_source(name, offset, kind, wider),
            _ => return Err("operand form".into()),
        };
        Ok(self.constant(constant))
    }

    fn named_source(&mut self, name: &str, offset: i64, kind: Type, wider: bool) -> Result<Reg, Refusal> {
        if let Some(special) = special(name) {
            return Ok(self.initial(Initial::Special(special)));
        }
        match self.names.get(name) {
            Some(&Named::Address(at)) if kind.bits() >= 32 => Ok(self.constant(at.wrapping_add(offset as u64))),
            Some(&Named::Global(index)) if kind.bits() == 64 => Ok(self.initial(Initial::Variable { index, offset })),
            _ if offset != 0 => Err("operand form".into()),
            _ => self.sized(name, kind, wider),
        }
    }

    /// A destination register.
    pub(crate) fn destination(&mut self, statement: &Statement<'_>, index: usize, kind: Type) -> Result<Reg, Refusal> {
        match statement.operand(index)? {
            Operand::Name(name) => self.sized(name, kind, false),
            _ => Err("operand form".into()),
        }
    }

    /// As [`Self::destination`]; the register may be wider than the type.
    pub(crate) fn wide_destination(
        &mut self,
        statement: &Statement<'_>,
        index: usize,
        kind: Type,
    ) -> Result<Reg, Refusal> {
        match statement.operand(index)? {
            Operand::Name(name) => self.sized(name, kind, true),
            _ => Err("operand form".into()),
        }
    }

    /// Bits of the register that a destination operand names.
    pub(crate) fn width(&self, register: Reg) -> u32 {
        self.bits[register.0 as usize]
    }

    /// Elements of a vector operand, or the operand itself; `_` is none.
    pub(crate) fn destinations(
        &mut self,
        statement: &Statement<'_>,
        index: usize,
        kind: Type,
        wider: bool,
    ) -> Result<Vec<Option<Reg>>, Refusal> {
        let operand = statement.operand(index)?;
        let elements = if let Operand::Vector(elements) = operand { elements } else { std::slice::from_ref(operand) };
        elements
            .iter()
            .map(|element| match element {
                Operand::Name(name) if name == "_" => Ok(None),
                Operand::Name(name) => self.sized(name, kind, wider).map(Some),
                _ => Err("operand form".into()),
            })
            .collect()
    }

    /// Elements of a vector operand, or the operand itself.
    pub(crate) fn sources(
        &mut self,
        statement: &Statement<'_>,
        index: usize,
        kind: Type,
        wider: bool,
    ) -> Result<Vec<Reg>, Refusal> {
        let operand = statement.operand(index)?;
        let elements = if let Operand::Vector(elements) = operand { elements } else { std::slice::from_ref(operand) };
        elements.iter().map(|element| self.source_operand(element, kind, wider)).collect()
    }

    /// Exactly `N` source registers.
    pub(crate) fn source_array<const N: usize>(
        &mut self,
        statement: &Statement<'_>,
        index: usize,
        kind: Type,
    ) -> Result<[Reg; N], Refusal> {
        let all = self.sources(statement, index, kind, false)?;
        all.try_into().map_err(|all: Vec<Reg>| format!("{} registers where {N} belong", all.len()).into())
    }

    /// Exactly `N` destination registers.
    pub(crate) fn destination_array<const N: usize>(
        &mut self,
        statement: &Statement<'_>,
        index: usize,
        kind: Type,
    ) -> Result<[Reg; N], Refusal> {
        let all: Option<Vec<Reg>> = self.destinations(statement, index, kind, false)?.into_iter().collect();
        let all = all.ok_or("`_` where a register belongs")?;
        all.try_into().map_err(|all: Vec<Reg>| format!("{} registers where {N} belong", all.len()).into())
    }

    /// An address operand.
    pub(crate) fn address(&mut self, statement: &Statement<'_>, index: usize) -> Result<Source, Refusal> {
        let Operand::Address { base, offset } = statement.operand(index)? else {
            return Err("operand form: an address belongs there".into());
        };
        let Some(name) = base else {
            return Ok(Source { base: self.constant(*offset as u64), offset: 0, narrow: false });
        };
        match self.names.get(name) {
            Some(&Named::Address(_) | &Named::Global(_)) => {
                let base = self.named_source(name, *offset, Type::B64, false)?;
                Ok(Source { base, offset: 0, narrow: false })
            }
            _ => {
                let base = self.register(name)?;
                let bits = self.bits[base.0 as usize];
                if bits < 32 {
                    return Err(format!("{name} has {bits} bits and cannot be an address").into());
                }
                Ok(Source { base, offset: *offset, narrow: bits == 32 })
            }
        }
    }

    /// A predicate register by name.
    fn predicate(&self, name: &str) -> Result<Pred, Refusal> {
        match self.names.get(name) {
            Some(&Named::Predicate(register)) => Ok(register),
            _ => Err(format!("there is no predicate register {name}").into()),
        }
    }

    /// A guard or predicate operand by name.
    pub(crate) fn condition(&self, name: &str, negated: bool) -> Result<Condition, Refusal> {
        Ok(Condition { register: self.predicate(name)?, negated })
    }

    /// A predicate source: register, `!` register, or constant.
    pub(crate) fn predicate_source(&mut self, statement: &Statement<'_>, index: usize) -> Result<Condition, Refusal> {
        match statement.operand(index)? {
            Operand::Name(name) => self.condition(name, false),
            Operand::Not(name) => self.condition(name, true),
            Operand::Integer(value) => {
                let value = *value != 0;
                let register = *self.constant_predicates[usize::from(value)].get_or_insert_with(|| {
                    self.predicates.push(Predicate { name: value.to_string(), constant: Some(value) });
                    Pred(self.predicates.len() as u32 - 1)
                });
                Ok(Condition { register, negated: false })
            }
            _ => Err("operand form".into()),
        }
    }

    /// A predicate destination; `_` is none.
    pub(crate) fn predicate_destination(
        &mut self,
        statement: &Statement<'_>,
        index: usize,
    ) -> Result<Option<Pred>, Refusal> {
        match statement.operand(index)? {
            Operand::Name(name) if name == "_" => Ok(None),
            Operand::Name(name) => self.predicate(name).map(Some),
            _ => Err("operand form".into()),
        }
    }

    /// `p` or `p|q`, either of them `_`.
    pub(crate) fn predicate_pair(
        &mut self,
        statement: &Statement<'_>,
        index: usize,
    ) -> Result<(Option<Pred>, Option<Pred>), Refusal> {
        let one = |name: &str| if name == "_" { Ok(None) } else { self.predicate(name).map(Some) };
        match statement.operand(index)? {
            Operand::Name(name) => Ok((one(name)?, None)),
            Operand::Pair(first, second) => Ok((one(first)?, one(second)?)),
            _ => Err("operand form".into()),
        }
    }

    /// `d|p`: a register and a predicate, or the register alone.
    pub(crate) fn register_and_predicate(
        &mut self,
        statement: &Statement<'_>,
        index: usize,
        kind: Type,
    ) -> Result<(Option<Reg>, Option<Pred>), Refusal> {
        let (register, predicate) = match statement.operand(index)? {
            Operand::Name(name) => (name, None),
            Operand::Pair(register, predicate) => (register, Some(predicate)),
            _ => return Err("operand form".into()),
        };
        let register = if register == "_" { None } else { Some(self.sized(register, kind, false)?) };
        let predicate = predicate.filter(|&name| name != "_").map(|name| self.predicate(name)).transpose()?;
        Ok((register, predicate))
    }

    /// A label's place.
    pub(crate) fn label(&self, statement: &Statement<'_>, index: usize) -> Result<u32, Refusal> {
        match statement.operand(index)? {
            Operand::Name(name) => self.labels.get(name).copied().ok_or_else(|| format!("label {name}").into()),
            _ => Err("operand form".into()),
        }
    }

    /// An operand that must be an integer constant.
    pub(crate) fn integer(&self, statement: &Statement<'_>, index: usize) -> Result<u64, Refusal> {
        match statement.operand(index)? {
            Operand::Integer(value) => Ok(*value),
            _ => Err(format!("operand {} is no constant", index + 1).into()),
        }
    }
}

fn special(name: &str) -> Option<Special> {
    let axis = |text: &str| ["x", "y", "z"].iter().position(|&axis| axis == text);
    let (base, dot) = name.split_once('.').unwrap_or((name, ""));
    Some(match (base, axis(dot)) {
        ("%tid", Some(axis)) => Special::Tid(axis),
        ("%ntid", Some(axis)) => Special::Ntid(axis),
        ("%ctaid", Some(axis)) => Special::Ctaid(axis),
        ("%nctaid", Some(axis)) => Special::Nctaid(axis),
        ("%clusterid", Some(axis)) => Special::ClusterId(axis),
        ("%nclusterid", Some(axis)) => Special::NumberOfClusters(axis),
        ("%cluster_ctaid", Some(axis)) => Special::ClusterCtaid(axis),
        ("%cluster_nctaid", Some(axis)) => Special::ClusterNctaid(axis),
        (_, Some(_)) => return None,
        ("%cluster_ctarank", None) => Special::ClusterCtaRank,
        ("%cluster_nctarank", None) => Special::ClusterNctaRank,
        ("%laneid", None) => Special::LaneId,
        ("%warpid", None) => Special::WarpId,
        ("%nwarpid", None) => Special::NumberOfWarps,
        ("%lanemask_eq", None) => Special::LanemaskEq,
        ("%lanemask_lt", None) => Special::LanemaskLt,
        ("%lanemask_le", None) => Special::LanemaskLe,
        ("%lanemask_gt", None) => Special::LanemaskGt,
        ("%lanemask_ge", None) => Special::LanemaskGe,
        ("%dynamic_smem_size", None) => Special::DynamicSharedBytes,
        _ => return None,
    })
}
