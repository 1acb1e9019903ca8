//! Rotary position embeddings: what a configuration says of them, in its older and its newer
//! spelling, and the frequencies that follow.
//!
//! Older: `rope_theta` and `rope_scaling {type | rope_type, …}`. Newer: `rope_parameters
//! {rope_type, rope_theta, …}`. Both may stand in one configuration if they agree. A key inside
//! them that its type does not know is refused unless its value is neutral: extensions of the
//! position embedding come as new keys there.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

mod frequencies;
mod section;
#[cfg(test)]
mod tests;

use section::Section;

/// Most rotated elements of a head: published heads have up to 576.
pub const MAX_WIDTH: u32 = 1 << 14;

/// Position embedding of a configuration, with every default resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeParameters {
    /// Base of the frequencies, above 1.
    pub theta: f64,
    /// How frequencies are changed for longer sequences.
    pub scaling: Scaling,
    /// How the configuration has `rope_parameters`.
    pub newer_spelling: Spelling,
    /// Keys of those objects that belong to other parts of the model, with their values.
    pub extra: Map<String, Value>,
}

/// How a configuration has `rope_parameters`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// Not at all.
    Absent,
    /// One object for all layers.
    Flat,
    /// An object for each kind of layer.
    PerLayerType,
}

/// What the rules of a family say about one of its position embeddings.
#[derive(Clone, Copy, Debug)]
pub struct RopeRequest<'a> {
    /// Base of the frequencies if the configuration states none.
    pub default_theta: f64,
    /// Base of the frequencies that another key states.
    pub theta: Option<f64>,
    /// Longest sequence of the model in tokens.
    pub max_positions: u32,
    /// Longest sequence before an extension that another key states.
    pub original: Option<u32>,
    /// The kind of layers that it is for.
    pub section: Option<&'a str>,
    /// Whether `rope_scaling` is about it.
    pub scaled: bool,
    /// Keys that belong to other parts of the model.
    pub extra: &'a [String],
    /// Other names for kinds of scaling.
    pub kinds: &'a BTreeMap<String, String>,
}

impl RopeRequest<'static> {
    /// The only position embedding of a model, which keeps to what its configuration says.
    #[must_use]
    pub fn plain(default_theta: f64, max_positions: u32) -> Self {
        static NO_KINDS: BTreeMap<String, String> = BTreeMap::new();
        Self {
            default_theta,
            theta: None,
            max_positions,
            original: None,
            section: None,
            scaled: true,
            extra: &[],
            kinds: &NO_KINDS,
        }
    }
}

/// How frequencies are changed for longer sequences. Lengths are in tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// Not at all.
    Default,
    /// All divided by `factor`.
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// A larger base beyond the model's longest sequence, which the engine never exceeds: as
    /// [`Scaling::Default`].
    Dynamic {
        /// At least 1.
        factor: f64,
    },
    /// A larger base whatever the sequence's length (Hunyuan's `dynamic` with `alpha`).
    Stretched {
        /// The base is multiplied by this to the power of `width / (width − 2)`.
        alpha: f64,
    },
    /// Low frequencies divided, high ones kept, a blend between them.
    Llama3 {
        /// Divisor of low frequencies, at least 1.
        factor: f64,
        /// Wavelengths above `original / low` are scaled.
        low: f64,
        /// Wavelengths below `original / high` are kept.
        high: f64,
        /// Longest sequence before the extension.
        original: u32,
    },
    /// Only the first pairs of a head turn, with the frequencies that they have among all.
    Proportional {
        /// The share of pairs that turn.
        partial: f64,
    },
    /// The same idea with a linear ramp over the pairs.
    Yarn(Yarn),
    /// A divisor for each pair, others for long sequences.
    Long(Long),
}

/// Parameters of [`Scaling::Long`].
#[derive(Clone, Debug, PartialEq)]
pub struct Long {
    /// Divisors of sequences up to `original` tokens.
    pub short_factor: Vec<f64>,
    /// Divisors of all positions of longer sequences.
    pub long_factor: Vec<f64>,
    /// Longest sequence before the extension.
    pub original: u32,
    /// Factor on cosine and sine.
    pub attention_factor: f64,
}

/// Parameters of [`Scaling::Yarn`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Divisor of low frequencies.
    pub factor: f64,
    /// Longest sequence before the extension.
    pub original: u32,
    /// Pairs that turn more often than this within `original` are kept.
    pub beta_fast: f64,
    /// Pairs that turn less often than this within `original` are scaled.
    pub beta_slow: f64,
    /// Whether the ramp's ends are whole pairs.
    pub truncate: bool,
    /// Factor on cosine and sine.
    pub attention_factor: f64,
    /// `mscale` and `mscale_all_dim` where the configuration has them; they are already in
    /// `attention_factor`.
    pub mscale: [Option<f64>; 2],
}

/// Position embeddings that cannot be honoured.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RopeError {
    /// A type that has no formula here.
    #[error(
        "{section} has rope_type {found:?}; known: default, linear, dynamic, llama3, proportional, yarn, longrope"
    )]
    UnknownType {
        /// The configuration's key.
        section: &'static str,
        /// The type.
        found: String,
    },
    /// Keys that the type does not know.
    #[error("{section} of rope_type {kind:?} has unknown keys: {keys}")]
    UnknownKeys {
        /// The configuration's key.
        section: &'static str,
        /// Its type.
        kind: String,
        /// Names and values.
        keys: String,
    },
    /// A value of the wrong kind or outside its range.
    #[error("{section}.{key} is {found}, expected {expected}")]
    Value {
        /// The configuration's key.
        section: &'static str,
        /// The key within it.
        key: &'static str,
        /// What the formula needs.
        expected: &'static str,
        /// What the configuration has.
        found: String,
    },
    /// Two statements of one thing differ.
    #[error("the configuration contradicts itself: {0}")]
    Contradiction(String),
    /// Lists of divisors that do not have one for each pair.
    #[error("{key} has {found} divisors for {pairs} pairs of rotated elements")]
    Divisors {
        /// The list.
        key: &'static str,
        /// Its length.
        found: usize,
        /// Pairs of a head.
        pairs: usize,
    },
    /// An odd, empty or unbelievable rotated width.
    #[error("{0} rotated elements per head, expected an even number up to {MAX_WIDTH}")]
    Width(u32),
}

impl RopeParameters {
    /// Parses a position embedding of a configuration.
    pub fn parse(
        config: &Map<String, Value>,
        request: &RopeRequest<'_>,
    ) -> Result<Self, RopeError> {
        let older = if request.scaled {
            Section::of(config, "rope_scaling", request)?
        } else {
            section::check_object(config, "rope_scaling")?;
            None
        };
        let newer = Section::of(config, "rope_parameters", request)?;
        let nested = newer.as_ref().filter(|newer| newer.is_nested());
        let own_theta = nested.map(Section::theta).transpose()?.flatten().or(request.theta);
        let mut thetas = vec![own_theta];
        if request.theta.is_none() {
            thetas.push(section::theta(config, "config")?);
        }
        let mut scalings = Vec::new();
        let mut extra = Map::new();
        for section in [&newer, &older].into_iter().flatten() {
            if request.theta.is_none() {
                thetas.push(section.theta()?);
            }
            if request.scaled || section.is_nested() {
                scalings.push(section.scaling(request)?);
            }
            extra.extend(section.extra(request));
        }
        let newer_spelling = match &newer {
            None => Spelling::Absent,
            Some(newer) if newer.is_nested() => Spelling::PerLayerType,
            Some(_) => Spelling::Flat,
        };
        let theta = agreed(thetas.into_iter().flatten(), "theta")?;
        Ok(Self {
            theta: theta.unwrap_or(request.default_theta),
            scaling: agreed(scalings.into_iter(), "scaling")?.unwrap_or(Scaling::Default),
            newer_spelling,
            extra,
        })
    }

    /// The value of `rope_scaling` that says this, null for [`Scaling::Default`]. Every default
    /// is spelled out, because readers differ in their defaults.
    #[must_use]
    pub fn rope_scaling(&self) -> Value {
        match self.scaling.to_map() {
            Some(map) => Value::Object(self.with_extra(map)),
            None => Value::Null,
        }
    }

    /// The value of `rope_parameters` that says this.
    #[must_use]
    pub fn rope_parameters(&self) -> Value {
        let mut map = self
            .scaling
            .to_map()
            .unwrap_or_else(|| Map::from_iter([("rope_type".to_owned(), Value::from("default"))]));
        map.insert("rope_theta".to_owned(), self.theta.into());
        Value::Object(self.with_extra(map))
    }

    fn with_extra(&self, mut map: Map<String, Value>) -> Map<String, Value> {
        map.extend(self.extra.clone());
        map
    }
}

impl Scaling {
    fn to_map(&self) -> Option<Map<String, Value>> {
        let (kind, entries): (&str, Vec<(&str, Value)>) = match self {
            Self::Default => return None,
            Self::Linear { factor } => ("linear", vec![("factor", (*factor).into())]),
            Self::Dynamic { factor } => ("dynamic", vec![("factor", (*factor).into())]),
            Self::Stretched { alpha } => {
                // mlx-lm asks for the older name of the kind.
                let kind = ("type", "dynamic".into());
                ("dynamic", vec![kind, ("factor", 1.0.into()), ("alpha", (*alpha).into())])
            }
            Self::Llama3 { factor, low, high, original } => (
                "llama3",
                vec![
                    ("factor", (*factor).into()),
                    ("low_freq_factor", (*low).into()),
                    ("high_freq_factor", (*high).into()),
                    ("original_max_position_embeddings", (*original).into()),
                ],
            ),
            Self::Proportional { partial } => {
                ("proportional", vec![("partial_rotary_factor", (*partial).into())])
            }
            Self::Yarn(yarn) => ("yarn", yarn.entries()),
            Self::Long(long) => (
                "longrope",
                vec![
                    // As above.
                    ("type", "longrope".into()),
                    ("short_factor", long.short_factor.clone().into()),
                    ("long_factor", long.long_factor.clone().into()),
                    ("original_max_position_embeddings", long.original.into()),
                    ("attention_factor", long.attention_factor.into()),
                ],
            ),
        };
        let mut map = Map::from_iter([("rope_type".to_owned(), Value::from(kind))]);
        map.extend(entries.into_iter().map(|(key, value)| (key.to_owned(), value)));
        Some(map)
    }
}

impl Yarn {
    fn entries(&self) -> Vec<(&'static str, Value)> {
        let mut entries = vec![
            ("factor", self.factor.into()),
            ("original_max_position_embeddings", self.original.into()),
            ("beta_fast", self.beta_fast.into()),
            ("beta_slow", self.beta_slow.into()),
            ("attention_factor", self.attention_factor.into()),
        ];
        if !self.truncate {
            entries.push(("truncate", false.into()));
        }
        for (key, value) in ["mscale", "mscale_all_dim"].into_iter().zip(self.mscale) {
            entries.extend(value.map(|value| (key, value.into())));
        }
        entries
    }
}

/// The value that all statements have, if there is one.
fn agreed<T: PartialEq + std::fmt::Debug>(
    mut statements: impl Iterator<Item = T>,
    what: &str,
) -> Result<Option<T>, RopeError> {
    let Some(first) = statements.next() else { return Ok(None) };
    match statements.find(|other| *other != first) {
        Some(other) => Err(RopeError::Contradiction(format!("{what} is {first:?} and {other:?}"))),
        None => Ok(Some(first)),
    }
}
