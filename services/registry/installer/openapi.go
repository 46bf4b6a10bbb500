package installer

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"strings"
	"sync"

	"github.com/emicklei/go-restful/v3"
	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	apimachineryversion "k8s.io/apimachinery/pkg/version"
	genericapi "k8s.io/apiserver/pkg/endpoints"
	"k8s.io/apiserver/pkg/endpoints/discovery"
	apiopenapi "k8s.io/apiserver/pkg/endpoints/openapi"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/server/routes"
	"k8s.io/apiserver/pkg/util/compatibility"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	utilopenapi "k8s.io/apiserver/pkg/util/openapi"
	"k8s.io/apiserver/pkg/util/responsewriter"
	"k8s.io/component-base/version"
	"k8s.io/kube-aggregator/pkg/apis/apiregistration"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	aggregatoropenapi "k8s.io/kube-aggregator/pkg/generated/openapi"
	"k8s.io/kube-openapi/pkg/builder"
	"k8s.io/kube-openapi/pkg/builder3"
	"k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/common/restfuladapter"
	"k8s.io/kube-openapi/pkg/handler"
	"k8s.io/kube-openapi/pkg/spec3"
	openapiutil "k8s.io/kube-openapi/pkg/util"
	"k8s.io/kube-openapi/pkg/validation/spec"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	generatedopenapi "k8s.io/kubernetes/pkg/generated/openapi"
	openidroutes "k8s.io/kubernetes/pkg/routes"
)

// documents builds OpenAPI documents with upstream's installer and builders, on request. Upstream's installer writes
// the routes of a group version with their parameters and names. The routes serve no request.
type documents struct {
	groups []genericapiserver.APIGroupInfo
	etag   string
	v3     *common.OpenAPIV3Config
	v2     *common.Config

	definitionsMu sync.Mutex
	// definitions are the schemas of all Go types for v3: 6 MB, made in some 5 ms. They are kept from the start and
	// from each build, until releaseDefinitions.
	definitions map[string]common.OpenAPIDefinition

	mu sync.Mutex
	// aggregators and others are the v2 documents. They are kept, because each change of a CRD needs them.
	aggregators, others *spec.Swagger
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
		v3:     genericapiserver.DefaultOpenAPIV3Config(get, namer),
		v2:     genericapiserver.DefaultOpenAPIConfig(get, namer),
	}
	// Otherwise the first builder sets these fields to a function that keeps the builder and its definitions, 8 MB.
	d.v2.GetOperationIDAndTagsFromRoute, d.v3.GetOperationIDAndTagsFromRoute = operationOf, operationOf
	d.definitions, d.v3.Definitions = d.v3.Definitions, nil // upstream's builder then calls GetDefinitions
	d.v3.GetDefinitions = func(ref common.ReferenceCallback) map[string]common.OpenAPIDefinition {
		d.definitionsMu.Lock()
		defer d.definitionsMu.Unlock()
		if d.definitions == nil {
			d.definitions = get(ref)
		}
		return d.definitions
	}
	// genericapiserver.Config.Complete adds the rest in kube-apiserver
	d.v2.Info.Title, d.v3.Info.Title = "Kubernetes", "Kubernetes"
	emulated := compatibility.DefaultBuildEffectiveVersion().EmulationVersion().String()
	d.v2.Info.Version, d.v3.Info.Version = emulated, emulated
	const scheme, description = "BearerToken", "Bearer Token authentication"
	security := []map[string][]string{{scheme: {}}}
	d.v2.SecurityDefinitions = &spec.SecurityDefinitions{scheme: {SecuritySchemeProps: spec.SecuritySchemeProps{
		Type: "apiKey", Name: "authorization", In: "header", Description: description,
	}}}
	d.v3.SecuritySchemes = spec3.SecuritySchemes{scheme: {SecuritySchemeProps: spec3.SecuritySchemeProps{
		Type: "apiKey", Name: "authorization", In: "header", Description: description,
	}}}
	d.v2.DefaultSecurity, d.v3.DefaultSecurity = security, security
	d.v2.CommonResponses = map[int]spec.Response{http.StatusUnauthorized: {
		ResponseProps: spec.ResponseProps{Description: "Unauthorized"},
	}}
	d.v3.CommonResponses = map[int]*spec3.Response{http.StatusUnauthorized: {
		ResponseProps: spec3.ResponseProps{Description: "Unauthorized"},
	}}
	h := sha256.New()
	fmt.Fprint(h, version.Get().GitVersion, utilfeature.DefaultFeatureGate)
	for i := range groups {
		for _, gv := range versionsOf(&groups[i]) {
			fmt.Fprint(h, gv, len(groups[i].VersionedResourcesStorageMap[gv.Version]))
		}
	}
	d.etag = fmt.Sprintf("%X", h.Sum(nil)[:16])
	return d, nil
}

// operationOf returns the operation ID and the tags of a route, as upstream's builders do with GetOperationIDAndTags.
func operationOf(r common.Route) (id string, tags []string, err error) {
	route, ok := r.(*restfuladapter.RouteAdapter)
	if !ok {
		return "", nil, fmt.Errorf("%T is not a route of go-restful", r)
	}
	return apiopenapi.GetOperationIDAndTags(route.Route)
}

// releaseDefinitions drops the definitions, which a later build makes again.
func (d *documents) releaseDefinitions() {
	d.definitionsMu.Lock()
	defer d.definitionsMu.Unlock()
	d.definitions = nil
}

// versionsOf returns the served versions of a group, by priority.
func versionsOf(info *genericapiserver.APIGroupInfo) (served []schema.GroupVersion) {
	for _, gv := range info.PrioritizedVersions {
		if len(info.VersionedResourcesStorageMap[gv.Version]) > 0 {
			served = append(served, gv)
		}
	}
	return served
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

// swaggers returns the v2 documents of the aggregator's own group and of everything else.
func (d *documents) swaggers() (aggregators, others *spec.Swagger, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.others == nil {
		own := func(path string) bool { return strings.HasPrefix(path, "/apis/"+apiregistration.GroupName) }
		if d.aggregators, err = d.swaggerOf(own); err != nil {
			return nil, nil, err
		}
		if d.others, err = d.swaggerOf(func(path string) bool { return !own(path) }); err != nil {
			return nil, nil, err
		}
	}
	return d.aggregators, d.others, nil
}

// swaggerOf returns the v2 document of the web services whose root path is wanted.
func (d *documents) swaggerOf(wanted func(path string) bool) (*spec.Swagger, error) {
	c, err := d.container(wanted)
	if err != nil {
		return nil, err
	}
	swagger, err := builder.BuildOpenAPISpecFromRoutes(restfuladapter.AdaptWebServices(c.RegisteredWebServices()), d.v2)
	if err != nil {
		return nil, err
	}
	swagger.Definitions = handler.PruneDefaults(swagger.Definitions) // older versions of kubectl fail on defaults
	return swagger, nil
}

// json returns the v3 document of a root path in JSON, such as apis/apps/v1, or nil if there is none.
func (d *documents) json(root string) ([]byte, error) {
	c, err := d.container(func(path string) bool { return path == "/"+root })
	if err != nil || len(c.RegisteredWebServices()) == 0 {
		return nil, err
	}
	service := routes.OpenAPI{V3Config: d.v3}.InstallV3(c, mux.NewPathRecorderMux("openapi"))
	req, err := http.NewRequest(http.MethodGet, "/openapi/v3/"+root, nil)
	if err != nil {
		return nil, err
	}
	w := responsewriter.NewInMemoryResponseWriter()
	service.HandleGroupVersion(w, req)
	if len(w.Data()) == 0 {
		return nil, fmt.Errorf("the OpenAPI document of /%s cannot be built", root)
	}
	return w.Data(), nil
}

// container returns upstream's web services whose root path is wanted.
func (d *documents) container(wanted func(path string) bool) (*restful.Container, error) {
	all, chosen := restful.NewContainer(), restful.NewContainer()
	routes.Version{Version: &apimachineryversion.Info{}}.Install(all)
	openidroutes.NewOpenIDMetadataServer(nil).Install(all)
	codecs := legacyscheme.Codecs
	all.Add(discovery.NewLegacyRootAPIHandler(nil, codecs, genericapiserver.DefaultLegacyAPIPrefix).WebService())
	all.Add(discovery.NewRootAPIsHandler(nil, codecs).WebService())
	for i := range d.groups {
		info := &d.groups[i]
		if name := info.PrioritizedVersions[0].Group; name != "" {
			all.Add(discovery.NewAPIGroupHandler(codecs, metav1.APIGroup{Name: name}).WebService())
		}
		for _, gv := range versionsOf(info) {
			if wanted(RootPath(gv)) {
				if err := installRoutes(all, info, gv); err != nil {
					return nil, fmt.Errorf("%s: %w", gv, err)
				}
			}
		}
	}
	for _, service := range all.RegisteredWebServices() {
		if wanted(service.RootPath()) {
			chosen.Add(service)
		}
	}
	return chosen, nil
}

// installRoutes adds the web service of a group version, as genericapiserver's InstallAPIGroup does.
func installRoutes(c *restful.Container, info *genericapiserver.APIGroupInfo, gv schema.GroupVersion) error {
	root := genericapiserver.APIGroupPrefix
	if gv.Group == "" {
		root = genericapiserver.DefaultLegacyAPIPrefix
	}
	version := &genericapi.APIGroupVersion{
		Storage:                    info.VersionedResourcesStorageMap[gv.Version],
		Root:                       root,
		GroupVersion:               gv,
		OptionsExternalVersion:     info.OptionsExternalVersion,
		MetaGroupVersion:           info.MetaGroupVersion,
		Serializer:                 info.NegotiatedSerializer,
		ParameterCodec:             info.ParameterCodec,
		Typer:                      info.Scheme,
		Creater:                    info.Scheme,
		Convertor:                  info.Scheme,
		ConvertabilityChecker:      info.Scheme,
		Defaulter:                  info.Scheme,
		Namer:                      runtime.Namer(meta.NewAccessor()),
		UnsafeConvertor:            runtime.UnsafeObjectConvertor(info.Scheme),
		TypeConverter:              managedfields.NewDeducedTypeConverter(),
		EquivalentResourceRegistry: runtime.NewEquivalentResourceRegistry(),
	}
	_, _, err := version.InstallREST(c)
	return err
}

// roots returns the root paths of the v3 documents, without the leading slash.
func (d *documents) roots() []string {
	all := []string{"api", "apis", "version", ".well-known/openid-configuration", "openid/v1/jwks"}
	for i := range d.groups {
		info := &d.groups[i]
		if name := info.PrioritizedVersions[0].Group; name != "" {
			all = append(all, "apis/"+name)
		}
		for _, gv := range versionsOf(info) {
			all = append(all, strings.TrimPrefix(RootPath(gv), "/"))
		}
	}
	return all
}

// RootPath returns the path of a group version: /api/v1, or /apis/ and its group and version.
func RootPath(gv schema.GroupVersion) string {
	if gv.Group == "" {
		return "/api/" + gv.Version
	}
	return "/apis/" + gv.String()
}
