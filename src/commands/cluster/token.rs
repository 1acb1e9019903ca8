//! Where `cluster add` takes the token from: a terminal without echo, standard input, a file, the
//! environment, or the command line, where other users of the machine can see it.

use std::{env, path::Path};

use anyhow::{Context as _, anyhow};
use shardpack_identity::JoinToken;

use super::secret::{self, STDIN, Wanted};
use crate::failure::Failure;

/// Holds a token where it is neither given nor asked for.
const VARIABLE: &str = "SHARDPACK_JOIN_TOKEN";

const TOKEN: Wanted =
    Wanted { what: "token", question: "join token that the node printed (not echoed): " };

/// The token that was given, or the one that is asked for.
pub(super) fn read(given: Option<&str>, file: Option<&Path>) -> Result<JoinToken, Failure> {
    let (text, from) = match (given, file) {
        (Some(STDIN), _) => (secret::read_stdin(TOKEN)?, "standard input".to_owned()),
        (Some(token), _) => (token.to_owned(), "--token".to_owned()),
        (None, Some(path)) if path == Path::new(STDIN) => {
            (secret::read_stdin(TOKEN)?, "standard input".to_owned())
        }
        (None, Some(path)) => (secret::read_file(TOKEN, path)?, path.display().to_string()),
        // A variable that is set to nothing is not set.
        (None, None) => match env::var(VARIABLE).ok().filter(|text| !text.trim().is_empty()) {
            Some(text) => (text, VARIABLE.to_owned()),
            None => (secret::read_stdin(TOKEN)?, "standard input".to_owned()),
        },
    };
    if text.trim().is_empty() {
        return Err(Failure::from(anyhow!("{from}: there is no token")).hint(
            "the node printed it when it started; type or paste it when asked, or give it with --token-file FILE",
        ));
    }
    // Neither the text nor where it differs is repeated: errors end up in logs.
    Ok(text.parse::<JoinToken>().context(from)?)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_token_that_is_none_is_not_repeated() {
        let error = super::read(Some("spj1_secret"), None).unwrap_err();
        let text = format!("{:#}", error.into_error());
        assert!(text.contains("--token") && text.contains("not a token"), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }
}
