//! Whose request it is, for whoever shares the engine out.

use std::net::IpAddr;

use shardpack_engine_api::Tenant;

/// The tenant of an API key: of its name, so that a new key of that name is the same tenant. Keys of a
/// group find each other's prefixes in the cache; no key gets into a group by its name.
pub(super) fn of_key(name: &str, weight: u32, group: Option<&str>) -> Tenant {
    let own = Tenant::new(number("key", name.as_bytes()));
    let prefix_cache = group.map_or(own.prefix_cache, |group| number("group", group.as_bytes()));
    Tenant { weight, prefix_cache, ..own }
}

/// The tenant of an address, where there are no keys. A network of IPv6's size for one customer counts
/// as one. All of them share the prefix cache: whoever reaches a server without keys is trusted, and a
/// household's machines ask with the same system prompts.
pub(super) fn of_address(address: IpAddr) -> Tenant {
    let network: &[u8] = match address.to_canonical() {
        IpAddr::V4(address) => &address.octets(),
        IpAddr::V6(address) => &address.octets()[..8],
    };
    Tenant { prefix_cache: Tenant::NOBODY.prefix_cache, ..Tenant::new(number("address", network)) }
}

fn number(kind: &str, bytes: &[u8]) -> u64 {
    let hash = blake3::derive_key(&format!("shardpack 2026 tenant {kind}"), bytes);
    let [a, b, c, d, e, f, g, h, ..] = hash;
    // 0 is nobody.
    u64::from_le_bytes([a, b, c, d, e, f, g, h]).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_customer_are_one_tenant() {
        let of = |text: &str| of_address(text.parse().unwrap());
        assert_eq!(of("192.0.2.7"), of("::ffff:192.0.2.7"));
        assert_ne!(of("192.0.2.7"), of("192.0.2.8"));
        assert_eq!(of("2001:db8:1:2::3"), of("2001:db8:1:2:ffff::9"));
        assert_ne!(of("2001:db8:1:2::3"), of("2001:db8:1:3::3"));
        assert_eq!(of("2001:db8:1:2::3").prefix_cache, of("192.0.2.7").prefix_cache);
    }

    #[test]
    fn keys_share_prefixes_within_their_group_only() {
        let of = |name, group| of_key(name, 2, group);
        assert_eq!(of("a", None), of("a", None));
        assert_ne!(of("a", None).id, of("b", None).id);
        assert_eq!(of("a", None).prefix_cache, of("a", None).id);
        let (a, b) = (of("a", Some("g")), of("b", Some("g")));
        assert!(a.id != b.id && a.prefix_cache == b.prefix_cache);
        assert_ne!(a.prefix_cache, of("g", None).prefix_cache);
        assert_eq!(a.weight, 2);
    }
}
