package installer

import (
	"reflect"
	"slices"
	"sort"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/deprecation"
	"k8s.io/apiserver/pkg/endpoints/discovery"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/registry/rest"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/version"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/handlers"
	"watershed.dev/services/registry/storage"
)

// describe sets the scope's discovery entry, as upstream's installer fills an APIResource.
func describe(scope *handlers.RequestScope, store *storage.Storage) error {
	apiResource := &registryv1.APIResource{
		Resource: &commonv1.Resource{
			Group:       scope.Resource.Group,
			Version:     scope.Resource.Version,
			Resource:    scope.Resource.Resource,
			Subresource: scope.Subresource,
		},
		Namespaced: scope.Namespaced,
		Kind:       kindProto(scope.Kind),
		Verbs:      verbsOf(scope.Storage),
	}
	describeStorage(apiResource, scope)
	if err := describeVersion(apiResource, scope); err != nil {
		return err
	}
	if st, ok := storageResourceOf(scope, store); ok && scope.Subresource == "" {
		apiResource.StorageResource, apiResource.StoredKind = st.Name(), kindProto(st.Kind)
		apiResource.Log = string(st.Etcd.Log)
		apiResource.SelectableFields = fieldLabels(scope, st)
		if st.Kind == scope.Kind {
			scope.ResponseCache = store.ResponseCache(st)
		}
		if f := decoratorOf(scope.Storage); f != nil {
			st.SetDecorator(f)
		}
	}
	scope.APIResource = apiResource
	return nil
}

// describeStorage sets the fields that the storage determines.
func describeStorage(apiResource *registryv1.APIResource, scope *handlers.RequestScope) {
	for _, m := range scope.Serializer.SupportedMediaTypes() {
		apiResource.MediaTypes = append(apiResource.MediaTypes, m.MediaType)
	}
	if p, ok := scope.Storage.(rest.ShortNamesProvider); ok {
		apiResource.ShortNames = p.ShortNames()
	}
	if p, ok := scope.Storage.(rest.CategoriesProvider); ok {
		apiResource.Categories = p.Categories()
	}
	if p, ok := scope.Storage.(rest.KindProvider); ok && p.Kind() != scope.Kind.Kind {
		apiResource.DiscoveryKind = p.Kind()
	}
	if p, ok := scope.Storage.(rest.SingularNameProvider); ok && scope.Subresource == "" {
		apiResource.Singular = p.GetSingularName()
	}
	if c, ok := scope.Storage.(rest.Connecter); ok {
		apiResource.ConnectMethods = c.ConnectMethods()
		_, apiResource.ConnectSubpath, _ = c.NewConnectOptions()
	}
	_, apiResource.GetWithOptions = scope.Storage.(rest.GetterWithOptions)
	_, apiResource.Table = scope.Storage.(rest.TableConvertor)
}

// describeVersion sets the fields that the served version determines.
func describeVersion(apiResource *registryv1.APIResource, scope *handlers.RequestScope) error {
	versioned, err := scope.Creater.New(scope.Kind)
	if err != nil {
		return err
	}
	versioned.GetObjectKind().SetGroupVersionKind(scope.Kind)
	if major, minor, err := deprecation.MajorMinor(version.Get()); err == nil &&
		deprecation.IsDeprecated(versioned, major, minor) {
		apiResource.Deprecation = deprecation.WarningMessage(versioned)
		apiResource.RemovedRelease = deprecation.RemovedRelease(versioned)
	}
	if p, ok := scope.Storage.(rest.StorageVersionProvider); ok && p.StorageVersion() != nil &&
		utilfeature.DefaultFeatureGate.Enabled(features.StorageVersionHash) {
		kinds, _, err := scope.Typer.ObjectKinds(scope.Storage.New())
		if err != nil {
			return err
		}
		if gvk, ok := p.StorageVersion().KindForGroupVersionKinds(kinds); ok {
			apiResource.StorageVersionHash = discovery.StorageVersionHash(gvk.Group, gvk.Version, gvk.Kind)
		}
	}
	if l, ok := scope.Storage.(rest.Lister); ok {
		kinds, _, err := scope.Typer.ObjectKinds(l.NewList())
		if err != nil {
			return err
		}
		apiResource.ListKind = kinds[0].Kind
	}
	return nil
}

// decoratorOf returns the function that a storage applies to every object that it reads. It sets defaults in Services
// and claims that are older than a field. The function is a field of the store that upstream's storages embed.
func decoratorOf(st rest.Storage) func(runtime.Object) {
	v := reflect.Indirect(reflect.ValueOf(st))
	if v.Kind() != reflect.Struct {
		return nil
	}
	f := v.FieldByName("Decorator")
	if !f.IsValid() || f.IsZero() {
		return nil
	}
	decorator, _ := f.Interface().(func(runtime.Object))
	return decorator
}

// storageResourceOf returns the stored resource of the scope's reads: its own, or the stored resource that it shares
// with another group.
func storageResourceOf(scope *handlers.RequestScope, store *storage.Storage) (*storage.Resource, bool) {
	if st, ok := store.ByName(scope.Resource.GroupResource().String()); ok {
		return st, true
	}
	if scope.Resource.Group == "events.k8s.io" {
		return store.ByName("events")
	}
	return nil, false
}

// fieldLabelAliases are field labels that a kind may accept besides the names of its stored fields.
var fieldLabelAliases = []string{
	"metadata.name",
	"metadata.namespace",
	"spec.host",
	"regarding.kind",
	"regarding.namespace",
	"regarding.name",
	"regarding.uid",
	"regarding.apiVersion",
	"regarding.resourceVersion",
	"regarding.fieldPath",
	"reportingController",
	"type",
	"reason",
	"status.podIPs",
}

// fieldLabels returns the labels that selectors can use, and the stored field of each. The scheme defines both.
func fieldLabels(scope *handlers.RequestScope, st *storage.Resource) map[string]string {
	labels := map[string]string{}
	for _, l := range append(st.SelectableFields(), fieldLabelAliases...) {
		const probe = "probe"
		if to, value, err := scope.Convertor.ConvertFieldLabel(scope.Kind, l, probe); err == nil && value == probe {
			labels[l] = to
		}
	}
	return labels
}

func kindProto(k schema.GroupVersionKind) *commonv1.Kind {
	return &commonv1.Kind{Group: k.Group, Version: k.Version, Kind: k.Kind}
}

// verbsOf returns the verbs that discovery lists for a storage, sorted.
func verbsOf(st rest.Storage) []string {
	set := []string{}
	add := func(verb string, has bool) {
		if has && !slices.Contains(set, verb) {
			set = append(set, verb)
		}
	}
	_, creater := st.(rest.Creater)
	_, named := st.(rest.NamedCreater)
	add("create", creater || named)
	_, deleter := st.(rest.GracefulDeleter)
	add("delete", deleter)
	_, collection := st.(rest.CollectionDeleter)
	add("deletecollection", collection)
	_, getter := st.(rest.Getter)
	_, withOptions := st.(rest.GetterWithOptions)
	add("get", getter || withOptions)
	_, lister := st.(rest.Lister)
	add("list", lister)
	_, patcher := st.(rest.Patcher)
	add("patch", patcher)
	_, updater := st.(rest.Updater)
	add("update", updater)
	_, watcher := st.(rest.Watcher)
	add("watch", watcher)
	if c, ok := st.(rest.Connecter); ok {
		for _, m := range c.ConnectMethods() {
			verb := map[string]string{
				"GET":    "get",
				"POST":   "create",
				"PUT":    "update",
				"PATCH":  "patch",
				"DELETE": "delete",
			}[m]
			add(verb, verb != "")
		}
	}
	sort.Strings(set)
	return set
}
