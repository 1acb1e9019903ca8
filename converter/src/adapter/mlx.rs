//! mlx-lm's tensors: `lora_a` `[in, rank]` and `lora_b` `[rank, out]` beside the module's own name.
//! Experts are stacked there and stand one by one in published checkpoints.

use std::collections::BTreeMap;

use super::{
    Base,
    change::{Change, Delta, Factor, Kind},
    config::{Mlx, MlxKind},
    experts::{apart, projection},
    file::AdapterFile,
    wrapper::in_model,
};

/// Finds the model's tensor for every tensor of the adapter.
pub(super) fn changes(
    config: &Mlx,
    file: &AdapterFile,
    adapter: usize,
    base: Base,
) -> Result<Vec<(String, Change)>, String> {
    let mut found = Vec::new();
    let mut modules: BTreeMap<&str, BTreeMap<&str, &str>> = BTreeMap::new();
    for name in file.tensors.keys() {
        let (module, part) = name.rsplit_once('.').unwrap_or((name, ""));
        if matches!(part, "lora_a" | "lora_b" | "m") && config.kind != MlxKind::Full {
            modules.entry(module).or_default().insert(part, name);
        } else if let Some(target) = in_model(name, base) {
            let kind = Kind::Replace { tensor: name.clone() };
            found.push((target, Change { adapter, kind }));
        } else {
            return Err(format!("changes {name:?}, which the model does not have"));
        }
    }
    for (name, parts) in modules {
        let (Some(a), Some(b)) = (parts.get("lora_a"), parts.get("lora_b")) else {
            return Err(format!("{name}: one of lora_a and lora_b is missing"));
        };
        let magnitude = parts.get("m").map(|name| (*name).to_owned());
        if magnitude.is_some() != (config.kind == MlxKind::Dora) {
            return Err(format!("{name}: fine_tune_type and its tensors contradict each other"));
        }
        let pair = Pair { name, a, b, magnitude };
        for (tensor, kind) in pair.kinds(config, file, base)? {
            found.push((tensor, Change { adapter, kind }));
        }
    }
    Ok(found)
}

struct Pair<'a> {
    name: &'a str,
    a: &'a str,
    b: &'a str,
    magnitude: Option<String>,
}

impl Pair<'_> {
    fn kinds(
        self,
        config: &Mlx,
        file: &AdapterFile,
        base: Base,
    ) -> Result<Vec<(String, Kind)>, String> {
        let (a, b) = (&file.tensors[self.a].shape[..], &file.tensors[self.b].shape[..]);
        let (rank, scale) = (config.rank, config.scale);
        if let (&[experts, a_rank, _], &[b_experts, _, b_rank]) = (a, b) {
            if (experts, a_rank, b_rank) != (b_experts, rank, rank) || self.magnitude.is_some() {
                return Err(self.misfit(a, b, rank));
            }
            return self.experts(config, (a, b), base);
        }
        let target = format!("{}.weight", self.name);
        let found = in_model(&target, base).and_then(|target| Some((base(&target)?, target)));
        let Some((info, target)) = found else {
            return Err(format!("changes {target:?}, which the model does not have"));
        };
        let (a_name, b_name) = (self.a.to_owned(), self.b.to_owned());
        let delta = match (&info.shape[..], a, b) {
            (&[rows, width], &[inputs, a_rank], &[b_rank, outputs])
                if (inputs, outputs, a_rank, b_rank) == (width, rows, rank, rank) =>
            {
                let (left, right) = (Factor::columns(b_name, rows), Factor::rows(a_name, rank));
                Delta { left, right, rank, shape: [rows, width], scale, magnitude: self.magnitude }
            }
            // An embedding: its rows are the inputs.
            (&[rows, width], &[inputs, a_rank], &[b_rank, outputs])
                if (inputs, outputs, a_rank, b_rank) == (rows, width, rank, rank)
                    && self.magnitude.is_none() =>
            {
                let (left, right) = (Factor::rows(a_name, rank), Factor::columns(b_name, width));
                Delta { left, right, rank, shape: [rows, width], scale, magnitude: None }
            }
            _ => return Err(self.misfit(a, b, rank)),
        };
        Ok(vec![(target, Kind::Delta(Box::new(delta)))])
    }

    /// `mlp.switch_mlp.gate_proj` stands for `mlp.experts.0.gate_proj` and its kin; a copy of mlx-lm's
    /// has it as it is.
    fn experts(
        self,
        config: &Mlx,
        (a, b): (&[u64], &[u64]),
        base: Base,
    ) -> Result<Vec<(String, Kind)>, String> {
        let unknown = || format!("changes {:?}, which the model does not have", self.name);
        let (rank, scale) = (config.rank, config.scale);
        let (width, rows) = (a[2], b[1]);
        let delta = |expert: u64| {
            let left =
                Factor { first: expert * rows * rank, ..Factor::rows(self.b.to_owned(), rank) };
            let right = Factor {
                first: expert * rank * width,
                ..Factor::columns(self.a.to_owned(), width)
            };
            Delta { left, right, rank, shape: [rows, width], scale, magnitude: None }
        };
        if let Some(stack) = in_model(&format!("{}.weight", self.name), base) {
            return Ok(vec![(stack, Kind::Stack((0..a[0]).map(delta).collect()))]);
        }
        let (layer, leaf) = self.name.split_once(".switch_mlp.").ok_or_else(unknown)?;
        let projection = projection(leaf).ok_or_else(unknown)?;
        let module = format!("{layer}.experts");
        let change = |expert: u64| {
            let target = apart(&module, expert, projection, base).ok_or_else(unknown)?;
            Ok((target, Kind::Delta(Box::new(delta(expert)))))
        };
        (0..a[0]).map(change).collect()
    }

    fn misfit(&self, a: &[u64], b: &[u64], rank: u64) -> String {
        format!(
            "{}: lora_a {a:?} and lora_b {b:?} do not fit a rank of {rank} and the model's matrix",
            self.name
        )
    }
}
