//! Which rules a configuration falls under, and whether they know all of it.

use serde_json::{Map, Value};

use super::{ResolveError, respelt, scopes::at_layer};
use crate::{
    expr::{self, Scope},
    inert::is_inert,
    rules::{Family, Let, RequireRule, RulePack, refused},
};
use shardpack_containers::neutral::is_neutral;

/// Where a configuration has that of its text model.
const INNER: &str = "text_config";

/// The rules of one `model_type`.
pub(super) struct FamilyRules<'a> {
    pub(super) name: &'a str,
    pub(super) pack: &'a RulePack,
    pub(super) family: &'a Family,
    pub(super) lets: &'a [Let],
}

/// Finds the rules for a configuration by `model_type` and checks its class.
pub(super) fn choose<'a>(
    config: &Map<String, Value>,
    packs: &'a [RulePack],
) -> Result<FamilyRules<'a>, ResolveError> {
    let model_type = config.get("model_type").unwrap_or(&Value::Null);
    let found = packs.iter().find_map(|pack| {
        let (name, family) = pack.file.families.get_key_value(model_type.as_str()?)?;
        Some(FamilyRules { name, pack, family, lets: &pack.lets[name] })
    });
    let Some(family) = found else {
        let inner = &config.get(INNER).unwrap_or(&Value::Null)["model_type"];
        for name in [model_type, inner].into_iter().filter_map(Value::as_str) {
            if let Some(reason) = refused(name) {
                return Err(ResolveError::Refused { model_type: name.to_owned(), reason });
            }
        }
        let mut known: Vec<&str> = packs.iter().flat_map(RulePack::model_types).collect();
        known.sort_unstable();
        known.dedup();
        return Err(ResolveError::UnknownFamily {
            found: shown(model_type),
            known: known.join(", "),
        });
    };
    let known = &family.family.architectures;
    let accepted = match config.get("architectures").unwrap_or(&Value::Null) {
        Value::Null => true,
        Value::Array(classes) => classes
            .iter()
            .all(|class| class.as_str().is_some_and(|class| known.iter().any(|k| is_of(class, k)))),
        _ => false,
    };
    if accepted {
        return Ok(family);
    }
    // One `model_type` may name architectures that have nothing else in common.
    let classes = config.get("architectures").and_then(Value::as_array);
    for class in classes.into_iter().flatten().filter_map(Value::as_str) {
        if let Some(reason) = refused(class) {
            return Err(ResolveError::Refused { model_type: class.to_owned(), reason });
        }
    }
    Err(ResolveError::UnknownClass {
        family: family.name.to_owned(),
        found: config.get("architectures").map_or_else(String::new, shown),
        known: known.join(", "),
    })
}

/// Whether a class is a known one, or that one without its LM head (`Qwen3Model`).
fn is_of(class: &str, known: &str) -> bool {
    let body = known.strip_suffix("ForCausalLM");
    let rest = body.and_then(|body| class.strip_prefix(body));
    class == known || rest.is_some_and(|rest| HEADLESS.contains(&rest))
}

/// What stands in place of `ForCausalLM` in the name of a class without LM head.
const HEADLESS: [&str; 2] = ["Model", "TextModel"];

/// Whether a class may have no LM head.
#[must_use]
pub fn may_be_headless(class: &str) -> bool {
    HEADLESS.iter().any(|end| class.ends_with(end))
}

/// A configuration as rules see it.
pub(super) struct TextModel {
    pub(super) config: Map<String, Value>,
    /// Whether it was taken out of one that describes more than text.
    pub(super) is_taken_out: bool,
    /// Whether keys of it were put back to where rules and other readers know them.
    pub(super) is_respelt: bool,
}

/// The configuration of the text model within a vision-language model. Rules for the whole see
/// the keys of both; otherwise there may be rules for the text model alone, whose tensors then
/// decide what else there is.
pub(super) fn text_model(config: &Map<String, Value>, packs: &[RulePack]) -> TextModel {
    let mut text = taken_out(config, packs);
    let before = text.config.clone();
    respelt::put_back(&mut text.config, packs);
    // What stands within an object of its own is left there.
    text.is_respelt = !config.contains_key(INNER) && text.config != before;
    text
}

fn taken_out(config: &Map<String, Value>, packs: &[RulePack]) -> TextModel {
    let whole = || TextModel { config: config.clone(), is_taken_out: false, is_respelt: false };
    let Some(inner) = config.get(INNER).and_then(Value::as_object) else { return whole() };
    let is_known = |config: &Map<String, Value>| {
        let name = config.get("model_type").and_then(Value::as_str);
        name.is_some_and(|name| packs.iter().any(|pack| pack.file.families.contains_key(name)))
    };
    // Some wholes call another text model by the name of a known one, whose rules do not name them.
    let is_refused = || {
        let name = config.get("model_type").and_then(Value::as_str);
        let families = packs.iter().flat_map(|pack| pack.file.families.values());
        let mut classes = families.flat_map(|family| &family.architectures);
        let own = config.get("architectures").and_then(|classes| classes.get(0)?.as_str());
        let is_named = own.is_some_and(|own| classes.any(|class| class == own));
        name.is_some_and(|name| refused(name).is_some()) && !is_named
    };
    let mut text = inner.clone();
    if let Some(name) = text_family(config, inner, packs) {
        text.insert("model_type".to_owned(), name.into());
    }
    if is_known(config) {
        text.remove("architectures");
        let outer = config.iter().filter(|(key, _)| *key != INNER);
        text.extend(outer.map(|(key, value)| (key.clone(), value.clone())));
        return TextModel { config: text, is_taken_out: false, is_respelt: false };
    } else if is_known(&text) && !is_refused() {
        text.remove("architectures");
        let tied = config.get("tie_word_embeddings").cloned();
        // Wrappers whose text model says so itself state the whole's default beside it.
        if !text.contains_key("tie_word_embeddings") {
            text.extend(tied.map(|tied| ("tie_word_embeddings".to_owned(), tied)));
        }
        return TextModel { config: text, is_taken_out: true, is_respelt: false };
    }
    whole()
}

/// The family whose rules say that it is the text model of this whole: the one that the text model
/// names, or the first.
fn text_family<'a>(
    config: &Map<String, Value>,
    inner: &Map<String, Value>,
    packs: &'a [RulePack],
) -> Option<&'a str> {
    let outer = config.get("model_type")?.as_str()?;
    let families = || {
        let families = packs.iter().flat_map(|pack| &pack.file.families);
        let within = |(_, family): &(_, &Family)| family.within.iter().any(|whole| whole == outer);
        families.filter(within).map(|(name, _)| name.as_str())
    };
    let own = inner.get("model_type").and_then(Value::as_str);
    families().find(|name| own == Some(name)).or_else(|| families().next())
}

/// Whether expressions of a family may name a key.
pub(super) fn knows_key(pack: &RulePack, family: &Family, key: &str) -> bool {
    pack.file.config.used.iter().chain(&family.used).any(|used| used == key)
}

impl<'a> FamilyRules<'a> {
    /// The family that packages are of.
    pub(super) fn canonical(&self) -> &'a str {
        self.family.same_as.as_deref().unwrap_or(self.name)
    }

    /// The class of that family.
    pub(super) fn class(&self) -> Option<&'a str> {
        let family = self.pack.file.families.get(self.canonical())?;
        family.architectures.first().map(String::as_str)
    }

    /// Keys of the configuration that expressions may name.
    pub(super) fn used_keys(&self) -> impl Iterator<Item = &'a str> {
        self.pack.file.config.used.iter().chain(&self.family.used).map(String::as_str)
    }

    /// Whether rules know a key of the configuration.
    pub(super) fn knows(&self, key: &str) -> bool {
        let ignored = self.pack.file.config.ignored.iter().chain(&self.family.ignored);
        self.used_keys().chain(ignored.map(String::as_str)).any(|known| known == key)
            || ["model_type", "architectures"].contains(&key)
    }

    /// Refuses keys that the rules do not know; warnings name those with a neutral value, and those
    /// of tools.
    pub(super) fn check_keys(
        &self,
        config: &Map<String, Value>,
    ) -> Result<Vec<String>, ResolveError> {
        let ignored = self.pack.file.config.ignored.iter().chain(&self.family.ignored);
        let known: std::collections::BTreeSet<&str> = self
            .used_keys()
            .chain(ignored.map(String::as_str))
            .chain(["model_type", "architectures"])
            .collect();
        let list = |wanted: &dyn Fn(&str, &Value) -> bool| {
            let mut keys: Vec<String> = config
                .iter()
                .filter(|(key, value)| !known.contains(key.as_str()) && wanted(key, value))
                // Null says the same as an absent key; nobody needs to hear of it.
                .filter(|(_, value)| !value.is_null())
                .map(|(key, value)| format!("{key} = {}", shown(value)))
                .collect();
            keys.sort_unstable();
            keys.join(", ")
        };
        let unknown = list(&|key, value| !is_neutral(value) && !is_inert(key));
        if !unknown.is_empty() {
            return Err(ResolveError::UnknownKeys { family: self.name.to_owned(), keys: unknown });
        }
        let neutral = list(&|key, value| is_neutral(value) && !is_inert(key));
        let inert = list(&|key, _| is_inert(key));
        let neutral = (!neutral.is_empty()).then(|| {
            format!("config keys without rules, taken as switched off by their values: {neutral}")
        });
        let inert = (!inert.is_empty())
            .then(|| format!("config keys of tools that no forward pass reads, left out: {inert}"));
        Ok(neutral.into_iter().chain(inert).collect())
    }

    /// Refuses values that cannot be honoured.
    pub(super) fn check_requirements(
        &self,
        scope: &Scope<'_>,
        layers: &[Scope<'_>],
    ) -> Result<(), ResolveError> {
        for rule in self.pack.file.require.iter().chain(&self.family.require) {
            let per_layer = rule.that.names().into_iter().any(|name| scope.get(name).is_none());
            if per_layer {
                for (layer, scope) in layers.iter().enumerate() {
                    self.require(rule, scope, &at_layer("require", layer))?;
                }
            } else {
                self.require(rule, scope, "require")?;
            }
        }
        Ok(())
    }

    fn require(
        &self,
        rule: &RequireRule,
        scope: &Scope<'_>,
        place: &str,
    ) -> Result<(), ResolveError> {
        if super::scopes::flag(&rule.that, scope, place)? {
            return Ok(());
        }
        let values: Vec<String> = rule
            .that
            .names()
            .into_iter()
            .filter_map(|name| Some((name, scope.get(name)?)))
            .filter(|(_, value)| **value != expr::Value::Null)
            .map(|(name, value)| format!("{name} = {value}"))
            .collect();
        let values = format!("{}: {}", self.name, values.join(", "));
        Err(ResolveError::Unsupported { message: rule.message.clone(), values })
    }
}

/// A value for a message.
pub(super) fn shown(value: &Value) -> String {
    expr::Value::from_json(value).map_or_else(|| "nested too deep".to_owned(), |v| v.to_string())
}
