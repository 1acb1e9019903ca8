//! Arguments of filters and methods, which jinja2 takes by place or by name.

use minijinja::{
    Error, ErrorKind, Value,
    value::{ArgType, Kwargs, Rest, from_args},
};

/// Arguments of one call.
pub(super) struct Arguments {
    by_place: Vec<Value>,
    by_name: Kwargs,
}

impl Arguments {
    pub(super) const fn new(by_place: Vec<Value>, by_name: Kwargs) -> Self {
        Self { by_place, by_name }
    }

    /// The arguments of a method.
    pub(super) fn of(args: &[Value]) -> Result<Self, Error> {
        let (by_place, by_name): (Rest<Value>, Kwargs) = from_args(args)?;
        Ok(Self { by_place: by_place.0, by_name })
    }

    /// The argument of a place and name; neither `none` nor undefined.
    pub(super) fn get(&self, place: usize, name: &str) -> Result<Option<Value>, Error> {
        let value = match self.by_place.get(place) {
            Some(value) => Some(value.clone()),
            None => self.by_name.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|value| !value.is_none() && !value.is_undefined()))
    }

    /// The argument of a place, whatever it is.
    pub(super) fn given(&self, place: usize) -> Option<Value> {
        self.by_place.get(place).cloned()
    }

    /// Like [`Self::get`], of a type, or a default.
    pub(super) fn get_or<T>(&self, place: usize, name: &str, default: T) -> Result<T, Error>
    where
        T: for<'a> ArgType<'a, Output = T>,
    {
        match self.get(place, name)? {
            Some(value) => T::from_value(Some(&value)),
            None => Ok(default),
        }
    }

    /// The text of a place and name.
    pub(super) fn text(&self, place: usize, name: &str) -> Result<Option<String>, Error> {
        self.get(place, name)?
            .map(|value| match value.as_str() {
                Some(text) => Ok(text.to_owned()),
                None => Err(invalid(format!("{name}: expected a string, found {}", value.kind()))),
            })
            .transpose()
    }

    /// Fails if there are more than `places` arguments, or any that no name was asked for.
    pub(super) fn finish(&self, places: usize) -> Result<(), Error> {
        if self.by_place.len() > places {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        self.by_name.assert_all_used()
    }

    /// All of them by name, for filters of minijinja that take them so.
    pub(super) fn named(&self, names: &[&'static str]) -> Result<Kwargs, Error> {
        let mut named = Vec::new();
        for (place, name) in names.iter().enumerate() {
            if let Some(value) = self.get(place, name)? {
                named.push((*name, value));
            }
        }
        self.finish(names.len())?;
        Ok(named.into_iter().collect())
    }
}

/// An error of a call.
pub(super) fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}
