//! PEFT's adapters of experts, which transformers holds as one parameter for all of a layer: for models
//! that store them so, and for those that store them one by one.

use std::collections::BTreeMap;

use super::{
    Base,
    change::{Delta, Factor, Kind},
    config::{ParameterOrder, Peft},
    file::AdapterFile,
    peft::check_rank,
    wrapper::in_model,
};

/// Most experts of a layer that are looked for; the largest published count is 512.
const MAX_EXPERTS: u64 = 4096;

/// The blocks of a layer that hold experts, as publishers and as transformers 5 name them.
const BLOCKS: &[&str] = &[".mlp.", ".block_sparse_moe.", ".feed_forward.", ".moe."];

/// Names of each projection of an expert.
const PROJECTIONS: &[[&str; 2]] = &[["gate_proj", "w1"], ["up_proj", "w3"], ["down_proj", "w2"]];

/// One parameter of all experts of a layer.
struct Parameter {
    /// transformers' name within the module; empty if the module is the parameter.
    name: &'static str,
    /// `[rows, columns]` of one expert, as transformers has it.
    matrix: [u64; 2],
    targets: Targets,
}

/// The model's tensors of a parameter.
enum Targets {
    /// One, `[experts, rows, columns]`.
    Stack(String),
    /// Of each expert some, whose rows follow each other.
    Apart(Vec<Vec<String>>),
}

/// The experts of a layer.
pub(super) struct Experts<'a> {
    /// transformers' name of the module.
    module: &'a str,
    count: u64,
    parameters: Vec<Parameter>,
    /// Whether transformers holds them `[in, out]` and says so to PEFT.
    is_turned: bool,
}

/// The factors of one parameter.
pub(super) struct Pair<'a> {
    name: &'a str,
    a: &'a str,
    b: &'a str,
    /// `[experts · rank, width]`.
    a_shape: [u64; 2],
    /// `[height, rank · experts]`.
    b_shape: [u64; 2],
}

impl<'a> Pair<'a> {
    /// The pair of a module, which must have nothing else.
    pub(super) fn of(
        name: &'a str,
        parts: &'a BTreeMap<&'static str, String>,
        file: &AdapterFile,
    ) -> Result<Self, String> {
        let (Some(a), Some(b), 2) = (parts.get("A"), parts.get("B"), parts.len()) else {
            return Err(format!("{name}: of fused experts only plain LoRA is merged"));
        };
        let shape = |tensor: &str| <[u64; 2]>::try_from(&file.tensors[tensor].shape[..]);
        let (Ok(a_shape), Ok(b_shape)) = (shape(a), shape(b)) else {
            return Err(format!("{name}: lora_A and lora_B must be matrices"));
        };
        Ok(Self { name, a, b, a_shape, b_shape })
    }
}

impl<'a> Experts<'a> {
    /// The experts that a module of an adapter is, if it is one of experts.
    pub(super) fn find(config: &Peft, name: &'a str, base: Base) -> Option<Self> {
        config.target_parameters.as_ref().filter(|list| !list.is_empty())?;
        // Of several parameters of one module each adapter stands within the next.
        let module = name.trim_end_matches(".base_layer");
        let stack = |leaf: &'static str| {
            let tensor = in_model(&format!("{module}.{leaf}"), base)?;
            let &[count, rows, columns] = &base(&tensor)?.shape[..] else { return None };
            let targets = Targets::Stack(tensor);
            Some((count, Parameter { name: leaf, matrix: [rows, columns], targets }))
        };
        let stacks = ["gate_up_proj", "gate_proj", "up_proj", "down_proj", "weight"];
        let stacks: Vec<_> = stacks.into_iter().filter_map(stack).collect();
        if let Some((count, _)) = stacks.first() {
            let count = *count;
            let is_turned = in_model(&format!("{module}.gate_up_proj_bias"), base).is_some();
            let parameters = stacks.into_iter().map(|(_, parameter)| parameter).collect();
            return Some(Self { module, count, parameters, is_turned });
        }
        if in_model(&format!("{module}.weight"), base).is_some() {
            return None;
        }
        let down = |expert| apart(module, expert, 2, base);
        let count = (0..MAX_EXPERTS).take_while(|expert| down(*expert).is_some()).count() as u64;
        let shape = |part| {
            let shape = base(&apart(module, 0, part, base)?)?.shape;
            <[u64; 2]>::try_from(&shape[..]).ok()
        };
        let of = |parts: &[usize]| {
            let name = |expert, part: &usize| apart(module, expert, *part, base);
            let targets = (0..count).map(|e| parts.iter().map(|part| name(e, part)).collect());
            Some(Targets::Apart(targets.collect::<Option<_>>()?))
        };
        let mut parameters = Vec::new();
        let down = shape(2)?;
        parameters.push(Parameter { name: "down_proj", matrix: down, targets: of(&[2])? });
        if let Some([rows, columns]) = shape(0) {
            let targets = of(&[0, 1])?;
            parameters.push(Parameter {
                name: "gate_up_proj",
                matrix: [2 * rows, columns],
                targets,
            });
        }
        Some(Self { module, count, parameters, is_turned: false })
    }

    /// What a pair changes. Which of the parameters it belongs to follows from the shapes.
    pub(super) fn changes(
        &self,
        pair: &Pair<'_>,
        config: &Peft,
    ) -> Result<Vec<(String, Kind)>, String> {
        let product = [pair.b_shape[0], pair.a_shape[1]];
        let fits = |product: [u64; 2]| self.parameters.iter().any(|it| it.matrix == product);
        let order = config.parameter_order(pair.name, product, &fits, self.is_turned)?;
        let [rows, columns] = match order {
            ParameterOrder::OutIn => product,
            ParameterOrder::InOut => [product[1], product[0]],
        };
        let listed = |parameter: &&Parameter| {
            let place = self.place(parameter);
            let listed = config.target_parameters.iter().flatten();
            listed
                .into_iter()
                .any(|target| place == *target || place.ends_with(&format!(".{target}")))
        };
        let fitting: Vec<&Parameter> =
            self.parameters.iter().filter(|it| it.matrix == [rows, columns]).collect();
        let parameter = match (
            &fitting[..],
            &fitting.iter().copied().filter(listed).collect::<Vec<_>>()[..],
        ) {
            (_, [parameter]) => *parameter,
            ([], _) => {
                return Err(format!(
                    "{}: factors for [{rows}, {columns}] fit neither gate_up_proj nor down_proj of its experts",
                    pair.name
                ));
            }
            ([first, ..], []) => {
                let place = self.place(first);
                return Err(format!("changes {place:?}, which target_parameters do not list"));
            }
            (_, [first, second, ..]) => {
                let [first, second] = [first, second].map(|it| self.place(it));
                return Err(format!(
                    "{}: its factors fit {first:?} and {second:?} alike",
                    pair.name
                ));
            }
        };
        let (rank, scale) = config.scaling(&self.place(parameter))?;
        check_rank(pair.name, rank * self.count, pair.a_shape[0], pair.b_shape[1])?;
        let delta = |expert, first_row, rows| {
            let (left, right) = pair.factors(order, expert, first_row, (rank, self.count));
            Delta { left, right, rank, shape: [rows, columns], scale, magnitude: None }
        };
        match &parameter.targets {
            Targets::Stack(tensor) => {
                let deltas = (0..self.count).map(|expert| delta(expert, 0, rows)).collect();
                Ok(vec![(tensor.clone(), Kind::Stack(deltas))])
            }
            Targets::Apart(experts) => {
                let mut changes = Vec::new();
                for (expert, tensors) in experts.iter().enumerate() {
                    let part_rows = rows / tensors.len() as u64;
                    for (part, tensor) in tensors.iter().enumerate() {
                        let delta = delta(expert as u64, part as u64 * part_rows, part_rows);
                        changes.push((tensor.clone(), Kind::Delta(Box::new(delta))));
                    }
                }
                Ok(changes)
            }
        }
    }

    /// transformers' name of a parameter.
    fn place(&self, parameter: &Parameter) -> String {
        format!("{}.{}", self.module, parameter.name)
    }
}

impl Pair<'_> {
    /// An expert's shares of both factors, for a matrix from `first_row` on: consecutive rows of A,
    /// every so many columns of B.
    fn factors(
        &self,
        order: ParameterOrder,
        expert: u64,
        first_row: u64,
        (rank, count): (u64, u64),
    ) -> (Factor, Factor) {
        let of_b = |first_row: u64| Factor {
            tensor: self.b.to_owned(),
            first: first_row * self.b_shape[1] + expert,
            outer_stride: self.b_shape[1],
            rank_stride: count,
        };
        let width = self.a_shape[1];
        let of_a = |first_column: u64| Factor {
            first: expert * rank * width + first_column,
            ..Factor::columns(self.a.to_owned(), width)
        };
        match order {
            ParameterOrder::OutIn => (of_b(first_row), of_a(0)),
            ParameterOrder::InOut => (of_a(first_row), of_b(0)),
        }
    }
}

/// The model's matrix of one expert, whatever its block is called.
pub(super) fn apart(module: &str, expert: u64, projection: usize, base: Base) -> Option<String> {
    let own = BLOCKS.iter().find(|block| module.contains(*block));
    let modules = BLOCKS
        .iter()
        .map(|block| own.map_or_else(|| module.to_owned(), |own| module.replacen(own, block, 1)));
    std::iter::once(module.to_owned()).chain(modules).find_map(|module| {
        PROJECTIONS[projection]
            .iter()
            .find_map(|leaf| in_model(&format!("{module}.{expert}.{leaf}.weight"), base))
    })
}

/// Which projection of [`apart`] a name is.
pub(super) fn projection(name: &str) -> Option<usize> {
    PROJECTIONS.iter().position(|names| names.contains(&name))
}
