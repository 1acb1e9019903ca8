//! One tensor under the names that it has in a text model by itself and in each wrapper around it:
//! an adapter that was trained on one fits the others.

use super::Base;

/// What stands before the names of a text model's parts, longest first.
const PREFIXES: &[&str] = &[
    "model.language_model.model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.text_model.",
    "model.",
];

/// What stands before the output head, which is beside those parts.
const HEAD_PREFIXES: &[&str] = &["model.language_model.", "language_model.", ""];

/// The model's own name of a tensor; none where it has no such tensor, or more than one.
pub(super) fn in_model(name: &str, base: Base) -> Option<String> {
    if base(name).is_some() {
        return Some(name.to_owned());
    }
    let (rest, prefixes) = match name.find("lm_head.") {
        Some(at) => (&name[at..], HEAD_PREFIXES),
        None => (PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix))?, PREFIXES),
    };
    let mut found = prefixes.iter().map(|prefix| format!("{prefix}{rest}"));
    let first = found.find(|name| base(name).is_some())?;
    found.all(|name| base(&name).is_none()).then_some(first)
}

#[cfg(test)]
mod tests {
    use shardpack_containers::container::TensorInfo;
    use shardpack_quantize::Dtype;

    use super::*;

    #[test]
    fn a_tensor_is_found_under_the_names_of_text_models_and_wrappers() {
        let check = |model: &[&str], name: &str, expected: Option<&str>| {
            let base = |wanted: &str| {
                let has = model.contains(&wanted);
                let (name, dtype) = (wanted.to_owned(), Dtype::F32);
                has.then(|| TensorInfo { name, dtype, shape: vec![1], offset: 0, size: 4 })
            };
            assert_eq!(in_model(name, &base).as_deref(), expected, "{name} in {model:?}");
        };
        let (text, wrapped) = ("model.layers.0.q.weight", "model.language_model.layers.0.q.weight");
        let older = "language_model.model.layers.0.q.weight";
        for model in [text, wrapped, older] {
            for name in [text, wrapped, older] {
                check(&[model], name, Some(model));
            }
        }
        check(
            &["language_model.lm_head.weight"],
            "lm_head.weight",
            Some("language_model.lm_head.weight"),
        );
        check(&["lm_head.weight"], "language_model.lm_head.weight", Some("lm_head.weight"));
        check(&[text], "model.layers.1.q.weight", None);
        // Two could be meant.
        check(&[wrapped, older], text, None);
    }
}
