package installer

import (
	"crypto/sha256"
	"fmt"
	"strings"
	"sync"

	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apimachinery/pkg/runtime/schema"
	genericapi "k8s.io/apiserver/pkg/endpoints"
	apiopenapi "k8s.io/apiserver/pkg/endpoints/openapi"
	genericapiserver "k8s.io/apiserver/pkg/server"
	utilopenapi "k8s.io/apiserver/pkg/util/openapi"
	"k8s.io/component-base/version"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	aggregatoropenapi "k8s.io/kube-aggregator/pkg/generated/openapi"
	"k8s.io/kube-openapi/pkg/builder"
	"k8s.io/kube-openapi/pkg/builder3"
	"k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/handler"
	openapiutil "k8s.io/kube-openapi/pkg/util"
	"k8s.io/kube-openapi/pkg/validation/spec"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	generatedopenapi "k8s.io/kubernetes/pkg/generated/openapi"

	"watershed.dev/services/registry/handlers"
)

// documents builds OpenAPI documents from RequestScopes on the first request. The definitions take tens of megabytes,
// and few clients read them.
type documents struct {
	groups []genericapiserver.APIGroupInfo
	etag   string
	v3     *common.OpenAPIV3Config
	v2     *common.Config

	mu    sync.Mutex
	built map[string]any
}

func openAPIDefinitions(ref common.ReferenceCallback) map[string]common.OpenAPIDefinition {
	all := generatedopenapi.GetOpenAPIDefinitions(ref)
	for k, v := range aggregatoropenapi.GetOpenAPIDefinitions(ref) {
		all[k] = v
	}
	return all
}

func newDocuments(groups []genericapiserver.APIGroupInfo) (*documents, error) {
	namer := apiopenapi.NewDefinitionNamer(legacyscheme.Scheme, apiextensionsapiserver.Scheme, aggregatorscheme.Scheme)
	get := utilopenapi.GetOpenAPIDefinitionsWithoutDisabledFeatures(openAPIDefinitions)
	d := &documents{
		groups: groups,
		built:  map[string]any{},
		v3:     genericapiserver.DefaultOpenAPIV3Config(get, namer),
		v2:     genericapiserver.DefaultOpenAPIConfig(get, namer),
	}
	// upstream sets these functions for go-restful's routes; they must be nil for our routes
	d.v2.GetOperationIDAndTags, d.v3.GetOperationIDAndTags = nil, nil //nolint:staticcheck
	d.v2.GetOperationIDAndTagsFromRoute, d.v3.GetOperationIDAndTagsFromRoute = operationID, operationID
	d.v2.Info.Title, d.v3.Info.Title = "Kubernetes", "Kubernetes"
	d.v2.Info.Version, d.v3.Info.Version = version.Get().GitVersion, version.Get().GitVersion
	bearer := &spec.SecurityScheme{SecuritySchemeProps: spec.SecuritySchemeProps{
		Type:        "apiKey",
		Name:        "authorization",
		In:          "header",
		Description: "Bearer Token authentication",
	}}
	d.v2.SecurityDefinitions = &spec.SecurityDefinitions{"BearerToken": bearer}
	d.v2.DefaultSecurity = []map[string][]string{{"BearerToken": {}}}
	h := sha256.New()
	fmt.Fprint(h, version.Get().GitVersion)
	for _, g := range groups {
		for v, resources := range g.VersionedResourcesStorageMap {
			fmt.Fprint(h, g.PrioritizedVersions[0].Group, v, len(resources))
		}
	}
	d.etag = fmt.Sprintf("%X", h.Sum(nil)[:16])
	return d, nil
}

// idVerbs are the verbs at the beginning of an operation's name.
var idVerbs = []string{"get", "log", "read", "replace", "patch", "delete", "watch", "connect",
	"proxy", "list", "create"}

// operationID inserts the group and version after the verb, as k8s.io/apiserver/pkg/endpoints/openapi does. Generated
// clients then have the same method names.
func operationID(r common.Route) (string, []string, error) {
	for _, verb := range idVerbs {
		rest, ok := strings.CutPrefix(r.OperationName(), verb)
		if !ok {
			continue
		}
		parts := strings.Split(strings.Trim(r.Path(), "/"), "/")
		if parts[0] == "api" {
			parts = append([]string{"apis", "core"}, parts[1:]...)
		}
		group, version := strings.TrimSuffix(parts[1], ".k8s.io"), parts[2]
		id := verb + apiopenapi.ToValidOperationID(group, true) + apiopenapi.ToValidOperationID(version, true) +
			apiopenapi.ToValidOperationID(rest, true)
		return id, []string{apiopenapi.ToValidOperationID(group, false) + "_" +
			apiopenapi.ToValidOperationID(version, false)}, nil
	}
	return "", nil, fmt.Errorf("operation names begin with a verb: %q", r.OperationName())
}

// resourceModels returns the schemas that server-side apply merges by. group "*" means every group.
func (d *documents) resourceModels(group string) (map[string]*spec.Schema, error) {
	var names []string
	for i := range d.groups {
		info := &d.groups[i]
		for _, gv := range info.PrioritizedVersions {
			if group != "*" && group != gv.Group {
				continue
			}
			for _, st := range info.VersionedResourcesStorageMap[gv.Version] {
				kind, err := genericapi.GetResourceKind(gv, st, info.Scheme)
				if err != nil {
					return nil, err
				}
				sample, err := info.Scheme.New(kind)
				if err != nil {
					return nil, err
				}
				names = append(names, openapiutil.GetCanonicalTypeName(sample))
			}
		}
	}
	return builder3.BuildOpenAPIDefinitionsForResources(d.v3, names...)
}

func (d *documents) get(path string, scopes []*handlers.RequestScope) (any, bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if doc, ok := d.built[path]; ok {
		return doc, true, nil
	}
	var doc any
	var err error
	if path == "v2" {
		var all []common.RouteContainer
		for _, gv := range versionsOf(scopes) {
			all = append(all, routesOf(gv, scopes))
		}
		var swagger *spec.Swagger
		if swagger, err = builder.BuildOpenAPISpecFromRoutes(all, d.v2); err == nil {
			// older versions of kubectl fail on defaults
			swagger.Definitions = handler.PruneDefaults(swagger.Definitions)
			doc = swagger
		}
	} else {
		root := "/" + strings.TrimPrefix(path, "v3/")
		for _, gv := range versionsOf(scopes) {
			if RootPath(gv) == root {
				doc, err = builder3.BuildOpenAPISpecFromRoutes([]common.RouteContainer{routesOf(gv, scopes)}, d.v3)
			}
		}
	}
	if err != nil || doc == nil {
		return nil, false, err
	}
	d.built[path] = doc
	return doc, true, nil
}

// RootPath returns the path of a group version: /api/v1, or /apis/ and its group and version.
func RootPath(gv schema.GroupVersion) string {
	if gv.Group == "" {
		return "/api/" + gv.Version
	}
	return "/apis/" + gv.String()
}

func versionsOf(scopes []*handlers.RequestScope) []schema.GroupVersion {
	var all []schema.GroupVersion
	seen := map[schema.GroupVersion]bool{}
	for _, scope := range scopes {
		if gv := scope.Resource.GroupVersion(); !seen[gv] {
			seen[gv] = true
			all = append(all, gv)
		}
	}
	return all
}
