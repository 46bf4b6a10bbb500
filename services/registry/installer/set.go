package installer

import (
	"fmt"
	"slices"
	"sort"
	"strings"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	genericapi "k8s.io/apiserver/pkg/endpoints"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/kube-openapi/pkg/validation/spec"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/handlers"
	"watershed.dev/services/registry/managed"
	"watershed.dev/services/registry/storage"
)

// Set holds the built-in APIs. It does not change after InstallAPIs.
type Set struct {
	Hooks  []PostStartHook
	Groups []*registryv1.Group

	groups        []genericapiserver.APIGroupInfo
	scopes        map[string]*handlers.RequestScope
	orderedScopes []*handlers.RequestScope
	equivalents   runtime.EquivalentResourceRegistry
	openapi       *documents
}

// newSet returns an empty set. identity returns a resource's prefix in etcd. Resources of the same prefix are
// equivalent.
func newSet(identity func(schema.GroupResource) string) *Set {
	return &Set{
		scopes:      map[string]*handlers.RequestScope{},
		equivalents: runtime.NewEquivalentResourceRegistryWithIdentity(identity),
	}
}

// RequestScope returns the scope of a built-in resource or subresource.
func (s *Set) RequestScope(r *commonv1.Resource) (*handlers.RequestScope, bool) {
	scope, ok := s.scopes[key(r.GetGroup(), r.GetVersion(), r.GetResource(), r.GetSubresource())]
	return scope, ok
}

func key(group, version, resource, subresource string) string {
	return group + "/" + version + "/" + resource + "/" + subresource
}

// install builds the groups' RequestScopes and discovery entries.
func (s *Set) install(store *storage.Storage) error {
	priorities := Priorities()
	var err error
	if s.openapi, err = newDocuments(s.groups); err != nil {
		return err
	}
	models, err := s.openapi.resourceModels("*")
	if err != nil {
		return err
	}
	converter, err := managedfields.NewTypeConverter(models, false)
	if err != nil {
		return fmt.Errorf("models: %w", err)
	}
	for i := range s.groups {
		info := &s.groups[i]
		name := info.PrioritizedVersions[0].Group
		g := &registryv1.Group{Name: name}
		for _, gv := range info.PrioritizedVersions {
			storages := info.VersionedResourcesStorageMap[gv.Version]
			if len(storages) == 0 {
				continue
			}
			g.Versions = append(g.Versions, gv.Version)
			g.GroupPriorityMinimum = priorities[gv].Group
			if err := s.installVersion(store, info, gv, storages, converter); err != nil {
				return fmt.Errorf("%s: %w", gv, err)
			}
		}
		slices.SortStableFunc(g.Versions, func(a, b string) int {
			return int(priorities[schema.GroupVersion{Group: name,
				Version: b}].Version - priorities[schema.GroupVersion{Group: name, Version: a}].Version)
		})
		s.Groups = append(s.Groups, g)
	}
	slices.SortStableFunc(s.Groups, func(a, b *registryv1.Group) int {
		if d := b.GroupPriorityMinimum - a.GroupPriorityMinimum; d != 0 {
			return int(d)
		}
		return strings.Compare(a.Name, b.Name)
	})
	return nil
}

func (s *Set) installVersion(store *storage.Storage, info *genericapiserver.APIGroupInfo, gv schema.GroupVersion,
	storages map[string]rest.Storage, converter managedfields.TypeConverter) error {
	var paths []string
	for p := range storages {
		paths = append(paths, p)
	}
	sort.Strings(paths)
	for _, path := range paths {
		resource, subresource, _ := strings.Cut(path, "/")
		scope, err := newRequestScope(info, gv, resource, subresource, storages[path],
			storages[resource], converter, s.equivalents)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if err := describe(scope, store); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		s.scopes[key(gv.Group, gv.Version, resource, subresource)] = scope
		s.orderedScopes = append(s.orderedScopes, scope)
		s.equivalents.RegisterKindFor(scope.Resource, subresource, scope.Kind)
	}
	return nil
}

func newRequestScope(
	info *genericapiserver.APIGroupInfo,
	gv schema.GroupVersion,
	resource, subresource string,
	st, parent rest.Storage,
	converter managedfields.TypeConverter,
	equivalents runtime.EquivalentResourceMapper,
) (*handlers.RequestScope, error) {
	kind, err := genericapi.GetResourceKind(gv, st, info.Scheme)
	if err != nil {
		return nil, err
	}
	scoper, ok := parent.(rest.Scoper)
	if !ok {
		return nil, fmt.Errorf("%q must implement scoper", resource)
	}
	scope := &handlers.RequestScope{
		Resource:                 gv.WithResource(resource),
		Subresource:              subresource,
		Kind:                     kind,
		Storage:                  st,
		Namespaced:               scoper.NamespaceScoped(),
		Serializer:               info.NegotiatedSerializer,
		ParameterCodec:           info.ParameterCodec,
		Creater:                  info.Scheme,
		Convertor:                info.Scheme,
		Defaulter:                info.Scheme,
		Typer:                    info.Scheme,
		UnsafeConvertor:          runtime.UnsafeObjectConvertor(info.Scheme),
		EquivalentResourceMapper: equivalents,
	}
	var reset map[fieldpath.APIVersion]fieldpath.Filter
	if r, ok := st.(rest.ResetFieldsStrategy); ok {
		reset = fieldpath.NewExcludeFilterSetMap(r.GetResetFields())
	}
	if r, ok := st.(rest.ResetFieldsFilterStrategy); ok {
		reset = r.GetResetFieldsFilter()
	}
	upstream, err := managedfields.NewDefaultFieldManager(
		converter,
		scope.UnsafeConvertor,
		scope.Defaulter,
		scope.Creater,
		kind,
		scope.HubGroupVersion(),
		subresource,
		reset,
	)
	scope.FieldManager = managed.New(upstream)
	return scope, err
}

// HasGroup reports whether a group is built in.
func (s *Set) HasGroup(name string) bool {
	return slices.ContainsFunc(s.Groups, func(g *registryv1.Group) bool { return g.Name == name })
}

// APIResources returns the discovery entries of all scopes.
func (s *Set) APIResources() []*registryv1.APIResource {
	var all []*registryv1.APIResource
	for _, scope := range s.orderedScopes {
		all = append(all, scope.APIResource)
	}
	return all
}

// OpenAPIHash returns a hash of the inputs of the built-in groups' documents.
func (s *Set) OpenAPIHash() string { return s.openapi.etag }

// CRDModels returns the schemas of the objects of apiextensions.k8s.io, and of all types that they contain.
func (s *Set) CRDModels() (map[string]*spec.Schema, error) {
	return s.openapi.resourceModels(apiextensionsv1.GroupName)
}

// OpenAPIV2 returns the v2 documents of apiregistration.k8s.io, which kube-aggregator serves itself, and of everything
// else. Callers must not change them.
func (s *Set) OpenAPIV2() (aggregators, others *spec.Swagger, err error) { return s.openapi.swaggers() }

// OpenAPIV3 returns a v3 document in JSON, or nil if there is none. root is the path of a group version, a group or a
// page without the leading slash, such as apis/apps/v1.
func (s *Set) OpenAPIV3(root string) ([]byte, error) { return s.openapi.json(root) }

// ReleaseOpenAPIDefinitions frees the memory that OpenAPIV3 and CRDModels keep for further calls: 6 MB.
func (s *Set) ReleaseOpenAPIDefinitions() { s.openapi.releaseDefinitions() }

// OpenAPIV3Roots returns the paths that have a v3 document, for OpenAPIV3.
func (s *Set) OpenAPIV3Roots() []string { return s.openapi.roots() }
