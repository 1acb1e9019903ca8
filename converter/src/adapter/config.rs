//! `adapter_config.json` of PEFT and of mlx-lm: which values decide the merge, which keys may say
//! anything, and which must say nothing because they would change it in a way that is not known.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::pattern::Patterns;
use crate::checkpoint::without_mark;

/// Largest rank; published adapters stay below 1024.
const MAX_RANK: u64 = 65_536;

/// Keys of PEFT that do not decide what a merged weight is: the tensors themselves say which
/// modules were trained, and the rest tells of training.
const PEFT_INERT: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

/// Initialisations that leave the model's own weights alone. Others move a part of them into the
/// adapter, which then does not fit the published model.
const PEFT_STARTS: &[&str] = &["gaussian", "eva", "orthogonal"];

/// What an adapter says of itself.
pub(super) enum Config {
    Peft(Box<Peft>),
    Mlx(Mlx),
}

impl Config {
    /// Whether a head that shares the embedding's weights follows what is done to the embedding: in
    /// mlx-lm both are one module, PEFT changes one of two.
    pub(super) fn keeps_ties(&self) -> bool {
        match self {
            Self::Peft(config) => config.ensure_weight_tying == Some(true),
            Self::Mlx(_) => true,
        }
    }
}

/// PEFT's `LoraConfig`.
#[derive(Debug, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "the fields of somebody else's format")]
pub(super) struct Peft {
    r: u64,
    lora_alpha: f64,
    #[serde(default)]
    rank_pattern: Patterns,
    #[serde(default)]
    alpha_pattern: Patterns,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    pub(super) use_dora: bool,
    #[serde(default)]
    fan_in_fan_out: bool,
    #[serde(default)]
    pub(super) lora_bias: bool,
    /// Whether what is done to an embedding is done to the head that shares its weights.
    #[serde(default)]
    ensure_weight_tying: Option<bool>,
    #[serde(default)]
    bias: Option<String>,
    #[serde(default)]
    init_lora_weights: Value,
    #[serde(default)]
    pub(super) target_parameters: Option<Vec<String>>,
    #[serde(default)]
    pub(super) trainable_token_indices: Value,
    #[serde(default)]
    pub(super) modules_to_save: Option<Vec<String>>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// How PEFT has taken the dimensions of a parameter of experts `[experts, out, in]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ParameterOrder {
    /// A is `[rank, in]`, B is `[out, rank]`: from PEFT 0.19 on.
    OutIn,
    /// A is `[rank, out]`, B is `[in, rank]`: before.
    InOut,
}

/// The first release of PEFT, major and minor, with [`ParameterOrder::OutIn`].
const OUT_IN_SINCE: [u64; 2] = [0, 19];

/// mlx-lm's configuration of a run.
#[derive(Debug)]
pub(super) struct Mlx {
    pub(super) rank: u64,
    pub(super) scale: f32,
    pub(super) kind: MlxKind,
}

/// mlx-lm's `fine_tune_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MlxKind {
    Lora,
    Dora,
    /// Whole tensors.
    Full,
}

/// Parses a configuration of either form.
pub(super) fn parse(text: &[u8]) -> Result<Config, String> {
    let text = without_mark(text);
    let json = |error: serde_json::Error| format!("adapter_config.json: {error}");
    let value: Value = serde_json::from_slice(text).map_err(json)?;
    if let Some(kind) = value.get("peft_type") {
        if kind.as_str() != Some("LORA") {
            return Err(format!("is of type {kind}, which cannot be merged; only LORA can"));
        }
        let config: Box<Peft> = serde_json::from_slice(text).map_err(json)?;
        config.check()?;
        return Ok(Config::Peft(config));
    }
    if value.get("lora_parameters").is_some() || value.get("fine_tune_type").is_some() {
        return Mlx::parse(&value).map(Config::Mlx);
    }
    Err("adapter_config.json has neither peft_type nor lora_parameters: not a known adapter"
        .to_owned())
}

fn is_neutral(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Object(members) => members.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

impl Peft {
    fn check(&self) -> Result<(), String> {
        if !(1..=MAX_RANK).contains(&self.r) {
            return Err(format!("adapter_config.json: a rank r of {} is not possible", self.r));
        }
        if !self.lora_alpha.is_finite() {
            return Err("adapter_config.json: lora_alpha is no number".to_owned());
        }
        if self.fan_in_fan_out {
            return Err("adapter_config.json: fan_in_fan_out is for models whose matrices are transposed; this one's are not".to_owned());
        }
        let bias = self.bias.as_deref().unwrap_or("none");
        if !matches!(bias, "none" | "all" | "lora_only") {
            return Err(format!("adapter_config.json: bias {bias:?} is not known"));
        }
        let start = match &self.init_lora_weights {
            Value::Null | Value::Bool(_) => true,
            Value::String(name) => PEFT_STARTS.contains(&name.as_str()),
            _ => false,
        };
        if !start {
            return Err(format!(
                "adapter_config.json: init_lora_weights {} changes the model's own weights, so the adapter does not fit the published ones; convert it to a plain LoRA first",
                self.init_lora_weights
            ));
        }
        let unknown = self
            .rest
            .iter()
            .find(|(key, value)| !PEFT_INERT.contains(&key.as_str()) && !is_neutral(value));
        match unknown {
            // Names a library, not a number; older files spell it with its default.
            Some((key, value)) if key == "megatron_config" && value.is_null() => Ok(()),
            Some((key, value)) => {
                Err(format!("adapter_config.json: {key} = {value} is not understood"))
            }
            None => Ok(()),
        }
    }

    /// How the factors of a parameter of experts are to be read, `[rows, columns]` being the product
    /// if A comes from the inputs. Shapes decide, or the version; without one a square product could
    /// be either. Since 0.19 PEFT asks the module whether its experts are `[in, out]`
    /// (`is_turned`).
    pub(super) fn parameter_order(
        &self,
        module: &str,
        [rows, columns]: [u64; 2],
        fits: &dyn Fn([u64; 2]) -> bool,
        is_turned: bool,
    ) -> Result<ParameterOrder, String> {
        match [fits([rows, columns]), fits([columns, rows])] {
            [_, false] => return Ok(ParameterOrder::OutIn),
            [false, true] => return Ok(ParameterOrder::InOut),
            [true, true] => {}
        }
        let stated = self.rest.get("peft_version").and_then(Value::as_str);
        let version = stated.and_then(|version| {
            let mut numbers = version.split('.').map(|part| part.parse::<u64>().ok());
            Some([numbers.next()??, numbers.next()??])
        });
        match version {
            Some(version) if version < OUT_IN_SINCE || is_turned => Ok(ParameterOrder::InOut),
            Some(_) => Ok(ParameterOrder::OutIn),
            None => Err(format!(
                "{module}: adapter_config.json has no peft_version; PEFT before 0.19 stores the factors of fused experts the other way round, and [{rows}, {columns}] fits both; add the peft_version that wrote the adapter"
            )),
        }
    }

    /// The rank of a module and what its product is scaled by.
    pub(super) fn scaling(&self, module: &str) -> Result<(u64, f32), String> {
        let rank = match self.rank_pattern.find(module)? {
            None => self.r,
            Some(rank) if rank >= 1.0 && rank <= MAX_RANK as f64 && rank.fract() == 0.0 => {
                rank as u64
            }
            Some(rank) => return Err(format!("rank_pattern gives {module:?} the rank {rank}")),
        };
        let alpha = self.alpha_pattern.find(module)?.unwrap_or(self.lora_alpha);
        let divisor = if self.use_rslora { (rank as f64).sqrt() } else { rank as f64 };
        Ok((rank, (alpha / divisor) as f32))
    }
}

impl Mlx {
    fn parse(value: &Value) -> Result<Self, String> {
        let kind = match value.get("fine_tune_type").unwrap_or(&Value::Null) {
            Value::Null if value.get("use_dora") == Some(&Value::Bool(true)) => MlxKind::Dora,
            Value::Null => MlxKind::Lora,
            Value::String(name) => match name.as_str() {
                "lora" => MlxKind::Lora,
                "dora" => MlxKind::Dora,
                "full" => MlxKind::Full,
                _ => return Err(format!("fine_tune_type {name:?} is not known")),
            },
            other => return Err(format!("fine_tune_type {other} is not known")),
        };
        if kind == MlxKind::Full {
            return Ok(Self { rank: 1, scale: 1.0, kind });
        }
        let parameters = value.get("lora_parameters").and_then(Value::as_object);
        let Some(parameters) = parameters else {
            return Err("adapter_config.json has no lora_parameters".to_owned());
        };
        let known = ["rank", "scale", "dropout", "keys", "alpha"];
        let unknown = parameters.iter().find(|(key, _)| !known.contains(&key.as_str()));
        if let Some((key, value)) = unknown {
            return Err(format!("lora_parameters: {key} = {value} is not understood"));
        }
        let rank = parameters.get("rank").and_then(Value::as_u64);
        let scale = parameters.get("scale").and_then(Value::as_f64);
        match (rank, scale) {
            (Some(rank @ 1..=MAX_RANK), Some(scale)) if scale.is_finite() => {
                Ok(Self { rank, scale: scale as f32, kind })
            }
            _ => Err("lora_parameters must give rank and scale as numbers".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        match parse(text.as_bytes()) {
            Ok(_) => panic!("{text} was accepted"),
            Err(problem) => problem,
        }
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_the_configuration() {
        let text = "\u{feff}{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8}";
        assert!(matches!(parse(text.as_bytes()), Ok(Config::Peft(config)) if config.r == 4));
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        let lora = |more: &str| format!(r#"{{"peft_type":"LORA","r":8,"lora_alpha":16,{more}}}"#);
        assert!(parse(lora(r#""use_bdlora":null,"layer_replication":[]"#).as_bytes()).is_ok());
        for (more, named) in [
            (r#""layer_replication":[[0,4]]"#, "layer_replication"),
            (r#""use_qalora":true"#, "use_qalora"),
            (r#""something_new":1"#, "something_new"),
            (r#""alora_invocation_tokens":[1]"#, "alora_invocation_tokens"),
            (r#""init_lora_weights":"pissa""#, "pissa"),
            (r#""fan_in_fan_out":true"#, "fan_in_fan_out"),
            (r#""bias":"some""#, "some"),
        ] {
            assert!(problem(&lora(more)).contains(named), "{more}");
        }
        assert!(problem(r#"{"peft_type":"IA3"}"#).contains("IA3"));
        assert!(problem(r#"{"fine_tune_type":"oft","lora_parameters":{}}"#).contains("oft"));
        assert!(problem("{}").contains("peft_type"));
        let mlx = r#"{"lora_parameters":{"rank":8,"scale":2.0,"twist":1}}"#;
        assert!(problem(mlx).contains("twist"));
    }
}
