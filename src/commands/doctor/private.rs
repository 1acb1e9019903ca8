//! What a text for strangers must not say: whose machine it is. Addresses, hardware numbers, and
//! the names of user, home folder and host become `…`.

use std::{env, net::IpAddr};

/// Shortest name that is replaced anywhere in a text; a shorter one stands in other words.
const SHORTEST_NAME: usize = 3;

/// Fewest digits of a hardware number, written in hex: a part of a GUID.
const SHORTEST_NUMBER: usize = 12;

/// What to hide.
pub(super) struct Private {
    home: Option<String>,
    names: Vec<String>,
}

impl Private {
    /// This machine's.
    pub(super) fn of_this_machine() -> Self {
        let variable = |name| env::var(name).ok();
        let host = super::machine::ask("hostname", &[]).ok();
        let host = host.as_deref().map(str::trim);
        Self::of(variable("HOME").as_deref(), variable("USER").as_deref(), host)
    }

    pub(super) fn of(home: Option<&str>, user: Option<&str>, host: Option<&str>) -> Self {
        let home = home.filter(|home| home.len() > 1).map(str::to_owned);
        let short = host.and_then(|host| host.split('.').next());
        // The longer name first: the shorter may be a part of it.
        let names = [host, short, user.filter(|user| *user != "root")];
        let names = names.into_iter().flatten().filter(|name| name.len() >= SHORTEST_NAME);
        Self { home, names: names.map(str::to_owned).collect() }
    }

    /// The text without them.
    pub(super) fn hide(&self, text: &str) -> String {
        let mut text = text.to_owned();
        if let Some(home) = &self.home {
            text = text.replace(home, "~");
        }
        for name in &self.names {
            text = text.replace(name, "…");
        }
        let words = text.split_inclusive(char::is_whitespace).map(|word| {
            let core = word.trim_matches(|c: char| !c.is_ascii_alphanumeric() && c != ':');
            let core = core.strip_suffix(':').unwrap_or(core);
            if is_private(core) { word.replace(core, "…") } else { word.to_owned() }
        });
        words.collect()
    }
}

/// Whether a word is an address or a hardware number.
fn is_private(word: &str) -> bool {
    let bare = word.strip_prefix("0x").unwrap_or(word);
    let is_hex = |c: char| c.is_ascii_hexdigit();
    let digits = bare.chars().filter(|c| is_hex(*c)).count();
    let is_number = digits >= SHORTEST_NUMBER
        && bare.chars().all(|c| is_hex(c) || matches!(c, '-' | ':'))
        && bare.chars().any(|c| c.is_ascii_digit());
    let host = word.rsplit_once(':').map_or(word, |(host, _)| host);
    let address = |text: &str| text.parse::<IpAddr>().ok();
    let is_shown = |ip: IpAddr| {
        // Loopback, the link-local addresses of examples, and netmasks.
        let text = ip.to_string();
        ip.is_loopback() || text.starts_with("169.254.") || text.starts_with("255.")
    };
    let ip = address(word).or_else(|| address(host));
    is_number || ip.is_some_and(|ip| !is_shown(ip))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_numbers_are_hidden_and_figures_stay() {
        let private = Private::of(Some("/home/bo"), Some("bo"), Some("mac-1.local"));
        let check = |text: &str, expected: &str| assert_eq!(private.hide(text), expected);
        check("/home/bo/x on mac-1.local and mac-1", "~/x on … and …");
        check("GID fe80::1234:56ff:fe78:9a01, 10.0.0.7:7420", "GID …, …");
        check("02:00:00:00:00:04 0x05AC897E0A474D02", "… …");
        check("00000009-0000-4000-8000-000000000009.", "….");
        for text in ["4-bit 1.2e-3 at 48 of 48", "127.0.0.1:7420", "16 KiB in 12.5 µs; 68719476 B"]
        {
            check(text, text);
        }
        // An example that everyone may type.
        let text = "sudo ifconfig en3 inet 169.254.3.1 netmask 255.255.255.0 alias";
        assert!(private.hide(text).contains("169.254.3.1"));
    }
}
