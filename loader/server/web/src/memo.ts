// A component that is rendered again only when one of its properties changes.
import { Component, type ComponentChildren } from "preact";
import { h } from "preact";
export function memo<P extends object>(render: (props: P) => ComponentChildren) {
    const Inner = render as any;
    return class Memo extends Component<P> {
        shouldComponentUpdate(next: P) { return Object.keys(next).some((name) => (next as any)[name] !== (this.props as any)[name]); }
        render() { return h(Inner, this.props as any); }
    };
}
