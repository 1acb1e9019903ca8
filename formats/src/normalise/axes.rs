//! The axes of a model.

use super::{
    Axis, Follow, MAX_LISTED_UNITS, ResolveError,
    family::FamilyRules,
    scopes::{size, wrong},
};
use crate::expr::Scope;

pub(super) fn resolve(
    family: &FamilyRules<'_>,
    scope: &Scope<'_>,
) -> Result<Vec<Axis>, ResolveError> {
    let rules = &family.pack.file.axes;
    let mut axes = Vec::new();
    for (name, rule) in rules {
        let place = format!("axis {name}");
        let len = size(&rule.len, scope, &place)?;
        let unit = rule.unit.as_ref().map_or(Ok(1), |unit| size(unit, scope, &place))?;
        let also: Vec<u32> =
            rule.also.iter().map(|unit| size(unit, scope, &place)).collect::<Result<_, _>>()?;
        let follow = match &rule.follow {
            None => None,
            Some(leader) => {
                let leader_rule = &rules[leader];
                let leader_len = size(&leader_rule.len, scope, &format!("axis {leader}"))?;
                if leader_len > MAX_LISTED_UNITS {
                    let expected = format!("at most {MAX_LISTED_UNITS}");
                    let (rule, place) = (&leader_rule.len, format!("axis {leader}"));
                    return Err(wrong(rule, &place, &expected, &leader_len.to_string()));
                }
                if leader_len % len != 0 {
                    let expected = format!("a divisor of {leader_len}, the units of axis {leader}");
                    return Err(wrong(&rule.len, &place, &expected, &len.to_string()));
                }
                let per_unit = leader_len / len;
                let map = (0..leader_len).map(|unit| unit / per_unit).collect();
                Some(Follow { axis: leader.clone(), map })
            }
        };
        axes.push(Axis { name: name.clone(), len, unit, also, align: rule.align, follow });
    }
    Ok(axes)
}
