//! Where templates are tried. They are foreign code: a program that converts other people's models names
//! a place once, when it starts, and every conversion tries them there.

use std::{collections::BTreeMap, sync::OnceLock};

use super::{Chat, Templates, probe_here, turn_end::after_answer_here};

/// Tries templates in a place where they can do no harm. An error says what they did there.
pub trait Prober: Send + Sync {
    /// As [`probe_here`].
    fn probe(
        &self,
        templates: &Templates,
        specials: &BTreeMap<String, String>,
    ) -> Result<Chat, String>;

    /// As [`after_answer_here`].
    fn after_answer(
        &self,
        templates: &Templates,
        specials: &BTreeMap<String, String>,
    ) -> Result<Vec<String>, String>;
}

static PROBER: OnceLock<Box<dyn Prober>> = OnceLock::new();

/// Tries every template of this process by `prober` from now on; the first that is named stays.
pub fn probe_with(prober: Box<dyn Prober>) {
    let _ = PROBER.set(prober);
}

/// Renders conversations and says what of them the model would see: in this process, or where
/// [`probe_with`] says.
pub fn probe(templates: &Templates, specials: &BTreeMap<String, String>) -> Result<Chat, String> {
    match PROBER.get() {
        Some(prober) => prober.probe(templates, specials),
        None => Ok(probe_here(templates, specials)),
    }
}

/// The texts that follow an assistant's answer; none for a template that does not render.
pub(super) fn after_answer(
    templates: &Templates,
    specials: &BTreeMap<String, String>,
) -> Result<Vec<String>, String> {
    match PROBER.get() {
        Some(prober) => prober.after_answer(templates, specials),
        None => Ok(after_answer_here(templates, specials)),
    }
}
