package main

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
)

// difference is an accepted difference with its reason. docs/operators/compatibility.md lists the same differences.
type difference struct {
	name, reason string
	// request matches "METHOD path"; detail matches the difference's text.
	request, detail *regexp.Regexp
	// when limits the difference further. It may be nil.
	when func(r *request, a, b answer) bool
}

// explained returns the accepted difference that matches, or nil.
func (p *report) explained(r *request, a, b answer, detail string) *difference {
	for _, d := range p.known {
		if d.request.MatchString(r.String()) && d.detail.MatchString(detail) && (d.when == nil || d.when(r, a, b)) {
			return d
		}
	}
	return nil
}

func is(pattern string) *regexp.Regexp { return regexp.MustCompile(pattern) }

// knownByConfiguration are the accepted differences under flags other than the default.
var knownByConfiguration = []*difference{
	{
		name:    "the services' own users",
		request: is(`.`),
		detail:  is(`.`),
		when: func(r *request, a, b answer) bool {
			return strings.Contains(r.about, "system:watershed:authz") && (a.code == 403 && b.code == 200 ||
				b.header.Get("X-Kubernetes-Pf-Flowschema-Uid") == "" || // flow control does not limit them
				strings.Contains(string(b.body), "not among the rights of this service of the system"))
		},
		reason: "A user that may impersonate every user may also impersonate an internal service. No policy grants " +
			"the rights of internal services.",
	},
	{
		name:    "anonymous users where everything is allowed",
		request: is(`.`),
		detail:  is(`.`),
		when: func(_ *request, _, b answer) bool {
			return strings.Contains(string(b.body), "anonymous requests are not allowed where everything is")
		},
		reason: "authz also rejects anonymous users that are impersonated or reviewed, because it does not receive " +
			"the authentication method.",
	},
	{
		name:    "ABAC's readonly and constrained impersonation",
		request: is(`^GET`),
		detail:  is(`.`),
		when: func(r *request, _, b answer) bool {
			return strings.Contains(r.about, "impersonates") && b.code == 403 &&
				strings.Contains(string(b.body), "cannot impersonate-on:")
		},
		reason: "kube-apiserver treats impersonate-on:…:get as a read, so ABAC's readonly lines allow it to readers. " +
			"Watershed treats it as the impersonation verb.",
	},
	{
		name:    "metrics are a page each",
		request: is(`^GET /metrics$`),
		detail:  is(`^: `),
		reason:  "The values of metrics differ between any two servers.",
	},
}

// knownOfAudit are the accepted differences in records of audit logs.
var knownOfAudit = []*difference{
	{
		name:    "a patch that is no JSON",
		request: is(`^PATCH`),
		detail:  is(`.`),
		when: func(r *request, a, b answer) bool {
			return !json.Valid(r.body) && !strings.Contains(string(a.body), "ResponseComplete") &&
				strings.Contains(string(b.body), "ResponseComplete")
		},
		reason: "kube-apiserver cannot encode an event with YAML or a truncated object, and drops it with its batch. " +
			"Watershed writes YAML as JSON, and other bodies as a string.",
	},
	{
		name:    "a Table without managedFields",
		request: is(`^GET`),
		detail:  is(`.`),
		when: func(_ *request, a, b answer) bool {
			return (a.err != nil || strings.Contains(string(a.body), `"stage":"Panic"`)) && b.code == 200
		},
		reason: "kube-apiserver panics if omitManagedFields applies to a Table whose rows have no object.",
	},
}

// repairs are the repair controllers that create Events of Services (pkg/registry/core/service/ipallocator and
// portallocator).
var repairs = []string{"ipallocator-repair-controller", "portallocator-repair-controller"}

var known = []*difference{
	{
		name:    "flow control's condition",
		request: is(`flowschemas`),
		detail:  is(`status|managedFields|rows\[\d+\]\.cells\[5\]|Dangling|Invalid value: `),
		reason: "A controller writes a condition to each FlowSchema, at most six times a minute. After an update has " +
			"removed the condition, it may be present on one side only.",
	},
	{
		name:    "flow control's condition, meanwhile",
		request: is(`^(PUT|PATCH) .*/flowschemas`),
		detail:  is(`.`),
		when: func(r *request, a, b answer) bool {
			return (a.code == 409) != (b.code == 409) && strings.Contains(string(r.body), "{{version")
		},
		reason: "The same controller may write the FlowSchema between the read of its revision and the write with it.",
	},
	{
		name:    "an Event of a repair",
		request: is(`^(GET|WATCH) .*/events`),
		detail:  is(`\.(items|rows)\b|remainingItemCount|^watch`),
		when: func(_ *request, a, b answer) bool {
			return slices.ContainsFunc(repairs, func(name string) bool {
				return strings.Contains(string(a.body), name) != strings.Contains(string(b.body), name)
			})
		},
		reason: "The repair controllers of cluster IPs and node ports are the same in both servers. They may see a " +
			"Service before its allocation, and then create an Event.",
	},
	{
		name:    "an Event of a repair, beyond the page",
		request: is(`^GET .*/events\?.*limit=`),
		detail:  is(`remainingItemCount`),
		reason:  "As above: the Event counts in remainingItemCount although the page does not show it.",
	},
	{
		name:    "429 of a cache that begins",
		request: is(`diff\.example\.com`),
		detail:  is(`.`),
		when:    func(_ *request, a, b answer) bool { return a.code == 429 && b.code == 200 },
		reason:  "kube-apiserver briefly rejects lists of a custom resource after its CRD has changed.",
	},
	{name: "order of a validation's errors", request: is(`horizontalpodautoscalers`), detail: is(`causes|message`),
		when: func(_ *request, a, b answer) bool {
			return a.code == 422 && b.code == 422 && len(a.body) == len(b.body)
		},
		reason: "The validation of metrics iterates over a map in random order."},
	{
		name:    "internalTrafficPolicy of ExternalName services, watched",
		request: is(`^WATCH .*/services`),
		detail:  is(`internalTrafficPolicy`),
		reason: "The field must be dropped on reads. kube-apiserver's watches show it until a list drops it from the " +
			"shared object. Watershed always drops it.",
	},
	{name: "an empty namespace", request: is(`^(POST|DELETE) /api/v1/namespaces//`), detail: is(`.`),
		reason: "kube-apiserver's web framework routes the path as a namespaced path with an empty namespace. Both " +
			"servers reject it."},
	{
		name:    "a connection without a name",
		request: is(`/(pods|nodes)//(proxy|exec)`),
		detail:  is(`.`),
		when:    func(_ *request, _, b answer) bool { return b.code == 404 },
		reason: "kube-apiserver authorizes it as a list, takes the name from the field selector, and connects. " +
			"Watershed rejects it.",
	},
	{
		name:    "an empty map that admission has seen",
		request: is(`/persistentvolumes`),
		detail:  is(`Unsupported value`),
		when:    func(_ *request, a, b answer) bool { return a.code == 422 && b.code == 422 },
		reason: "Admission passes objects in protobuf, which does not distinguish an empty map from none. The error " +
			"shows null for {}.",
	},
	{
		name:    "some empty Tables",
		request: is(`^GET`),
		detail:  is(`^\.rows: null \| \[\]$`),
		reason:  "kube-apiserver returns null as the rows of some empty Tables. Watershed returns an empty list.",
	},
	{name: "pages of OpenAPI v3", request: is(`GET /openapi/v3$`), detail: is(`.`),
		reason: "kube-apiserver also publishes documents of its discovery pages, and computes its own hashes."},
	{
		name:    "the index",
		request: is(`GET /$`),
		detail:  is(`\.paths`),
		reason:  "kube-apiserver lists a health check for each of its start hooks.",
	},
	{name: "metadata of DaemonSets", request: is(`daemonsets`), detail: is(`deprecated.daemonset.template.generation`),
		reason: "Watershed cuts metadata from the served object, which contains an annotation that the conversion to " +
			"apps/v1 adds."},
}
