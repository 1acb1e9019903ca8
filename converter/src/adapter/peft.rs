//! PEFT's tensors: their names to the model's tensors. The same weights are stored up to three
//! times for a module to save; fused experts nest.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    Base,
    change::{Change, Delta, Factor, Kind},
    config::Peft,
    experts::{Experts, Pair},
    file::AdapterFile,
    wrapper::in_model,
};

/// What PEFT puts before the model's own names.
const PREFIX: &str = "base_model.model.";

/// The tensors of one module, by what they are.
#[derive(Default)]
struct Module {
    parts: BTreeMap<&'static str, String>,
}

/// Endings of names, longest first where one ends another, and what they stand for.
const ENDINGS: &[(&str, &str)] = &[
    (".lora_embedding_A", "embedding_A"),
    (".lora_embedding_B", "embedding_B"),
    (".lora_A.weight", "A"),
    (".lora_B.weight", "B"),
    (".lora_B.bias", "B_bias"),
    (".lora_magnitude_vector.weight", "magnitude"),
    (".lora_magnitude_vector", "magnitude"),
    (".token_adapter.trainable_tokens_delta", "tokens"),
    (".trainable_tokens_delta", "tokens"),
    (".original_module.weight", "ignored"),
    (".original_module.bias", "ignored"),
    (".modules_to_save.weight", "saved_weight"),
    (".modules_to_save.bias", "saved_bias"),
    (".base_layer.weight", "weight"),
    (".base_layer.bias", "bias"),
    (".weight", "weight"),
    (".bias", "bias"),
];

/// Finds the model's tensor for every tensor of the adapter.
pub(super) fn changes(
    config: &Peft,
    file: &AdapterFile,
    adapter: usize,
    base: Base,
) -> Result<Vec<(String, Change)>, String> {
    let mut context = Context { config, file, base, changes: Vec::new() };
    let modules = modules(file)?;
    for (name, module) in &modules {
        match Experts::find(config, name, base) {
            Some(experts) => {
                let pair = Pair::of(name, &module.parts, file)?;
                context.changes.extend(experts.changes(&pair, config)?);
            }
            None => context.module(name, module)?,
        }
    }
    if config.trainable_token_indices != Value::Null
        && !modules.values().any(|module| module.parts.contains_key("tokens"))
    {
        return Err("trainable_token_indices are set, but no trained tokens are stored".to_owned());
    }
    let kinds = context.changes.into_iter();
    Ok(kinds.map(|(tensor, kind)| (tensor, Change { adapter, kind })).collect())
}

fn modules(file: &AdapterFile) -> Result<BTreeMap<String, Module>, String> {
    let mut modules: BTreeMap<String, Module> = BTreeMap::new();
    for stored in file.tensors.keys() {
        // Some versions keep the adapter's own name.
        let name = stored.replace(".default.", ".");
        let name = name.strip_suffix(".default").unwrap_or(&name);
        let Some(name) = name.strip_prefix(PREFIX) else {
            return Err(format!(
                "{stored:?} is no name of PEFT's: it does not begin with {PREFIX}"
            ));
        };
        let ending = ENDINGS.iter().find_map(|(ending, part)| {
            name.strip_suffix(ending).map(|module| (module.to_owned(), *part))
        });
        let Some((module, part)) = ending else {
            return Err(format!("{stored:?} is not understood"));
        };
        if part == "ignored" {
            continue;
        }
        let parts = &mut modules.entry(module).or_default().parts;
        if let Some(first) = parts.insert(part, stored.clone()) {
            return Err(format!("{first:?} and {stored:?} are the same tensor"));
        }
    }
    Ok(modules)
}

struct Context<'a> {
    config: &'a Peft,
    file: &'a AdapterFile,
    base: Base<'a>,
    changes: Vec<(String, Kind)>,
}

impl Context<'_> {
    fn shape(&self, tensor: &str) -> &[u64] {
        &self.file.tensors[tensor].shape
    }

    /// The model's tensor of a module; refused by the module's name when there is none.
    fn target(&self, module: &str, part: &str) -> Result<String, String> {
        let name = format!("{module}.{part}");
        in_model(&name, self.base)
            .ok_or_else(|| format!("changes {name:?}, which the model does not have"))
    }

    fn module(&mut self, name: &str, module: &Module) -> Result<(), String> {
        let mut parts = module.parts.clone();
        let mut take = |part: &str| parts.remove(part);
        for (part, saved, plain) in
            [("weight", "saved_weight", "weight"), ("bias", "saved_bias", "bias")]
        {
            // The trained values stand under both names; which is read makes no difference.
            let (saved, plain) = (take(saved), take(plain));
            if let Some(tensor) = saved.or(plain) {
                self.check_saved(name, part)?;
                self.changes.push((self.target(name, part)?, Kind::Replace { tensor }));
            }
        }
        if let Some(tensor) = take("tokens") {
            let rows = self.token_rows(name)?;
            let target = self.target(name, "weight")?;
            self.changes.push((target, Kind::ReplaceRows { tensor, rows }));
        }
        let (a, b) = (take("A"), take("B"));
        let (embedding_a, embedding_b) = (take("embedding_A"), take("embedding_B"));
        let magnitude = take("magnitude");
        let bias = take("B_bias");
        if magnitude.is_some() != (self.config.use_dora && (a.is_some() || embedding_a.is_some())) {
            return Err(format!(
                "{name}: use_dora and lora_magnitude_vector contradict each other"
            ));
        }
        match (a, b, embedding_a, embedding_b) {
            (None, None, None, None) => {}
            (Some(a), Some(b), None, None) => self.linear(name, a, b, magnitude)?,
            (None, None, Some(a), Some(b)) => self.embedding(name, a, b, magnitude.as_deref())?,
            _ => return Err(format!("{name}: one of lora_A and lora_B is missing")),
        }
        if let Some(tensor) = bias {
            if !self.config.lora_bias {
                return Err(format!("{name}: stores a bias of lora_B, but lora_bias is not set"));
            }
            let (_, scale) = self.config.scaling(name)?;
            let target = self.target(name, "bias")?;
            self.changes.push((target, Kind::Add { tensor, scale }));
        }
        Ok(())
    }

    /// A stored weight that nobody asked to store means that the adapter is not understood.
    fn check_saved(&self, name: &str, part: &str) -> Result<(), String> {
        let last = name.rsplit('.').next().unwrap_or(name);
        let listed = self.config.modules_to_save.iter().flatten();
        let mut listed = listed.map(|module| module.rsplit('.').next().unwrap_or(module));
        let resized = matches!(last, "embed_tokens" | "lm_head" | "wte" | "embeddings");
        if part == "bias" || resized || listed.any(|module| name.split('.').any(|p| p == module)) {
            return Ok(());
        }
        Err(format!("stores {name}.{part} whole, but modules_to_save does not list it"))
    }

    fn token_rows(&self, name: &str) -> Result<Vec<u64>, String> {
        let list = match &self.config.trainable_token_indices {
            Value::Object(lists) => lists
                .iter()
                .find(|(module, _)| name == *module || name.ends_with(&format!(".{module}")))
                .map(|(_, list)| list),
            list => Some(list),
        };
        let rows = list
            .and_then(Value::as_array)
            .and_then(|list| list.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>());
        rows.ok_or_else(|| format!("{name}: trainable_token_indices do not list its tokens"))
    }

    fn linear(
        &mut self,
        name: &str,
        a: String,
        b: String,
        magnitude: Option<String>,
    ) -> Result<(), String> {
        let target = self.target(name, "weight")?;
        let (rank, scale) = self.config.scaling(name)?;
        let (&[a_rank, width], &[rows, b_rank]) = (self.shape(&a), self.shape(&b)) else {
            return Err(format!("{name}: lora_A and lora_B must be matrices"));
        };
        check_rank(name, rank, a_rank, b_rank)?;
        let delta = Delta {
            left: Factor::rows(b, rank),
            right: Factor::columns(a, width),
            rank,
            shape: [rows, width],
            scale,
            magnitude,
        };
        self.changes.push((target, Kind::Delta(Box::new(delta))));
        Ok(())
    }

    fn embedding(
        &mut self,
        name: &str,
        a: String,
        b: String,
        magnitude: Option<&str>,
    ) -> Result<(), String> {
        if magnitude.is_some() {
            return Err(format!("{name}: DoRA on an embedding is not merged"));
        }
        let target = self.target(name, "weight")?;
        let (rank, scale) = self.config.scaling(name)?;
        let (&[a_rank, rows], &[width, b_rank]) = (self.shape(&a), self.shape(&b)) else {
            return Err(format!("{name}: lora_embedding_A and lora_embedding_B must be matrices"));
        };
        check_rank(name, rank, a_rank, b_rank)?;
        let delta = Delta {
            left: Factor::columns(a, rows),
            right: Factor::rows(b, rank),
            rank,
            shape: [rows, width],
            scale,
            magnitude: None,
        };
        self.changes.push((target, Kind::Delta(Box::new(delta))));
        Ok(())
    }
}

pub(super) fn check_rank(name: &str, rank: u64, a: u64, b: u64) -> Result<(), String> {
    if (a, b) == (rank, rank) {
        return Ok(());
    }
    Err(format!("{name}: adapter_config.json gives the rank {rank}, lora_A has {a} and lora_B {b}"))
}
