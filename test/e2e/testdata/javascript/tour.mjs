// tour.mjs runs the steps of tour_test.go with the JavaScript client, and prints each response as a line of JSON.
import * as k8s from '@kubernetes/client-node';

const config = new k8s.KubeConfig();
config.loadFromFile(process.argv[2]);
const core = config.makeApiClient(k8s.CoreV1Api);
const apps = config.makeApiClient(k8s.AppsV1Api);
const custom = config.makeApiClient(k8s.CustomObjectsApi);
const objects = k8s.KubernetesObjectApi.makeApiClient(config);
const namespace = 'default';
const group = { group: 'water.example.com', version: 'v1', namespace, plural: 'wells' };

// step prints the response of call, or its error.
async function step(name, call) {
  let result;
  try {
    result = await call();
  } catch (error) {
    result = { code: error.code, body: error.body };
    if (error.code === undefined) throw error;
  }
  console.log(JSON.stringify({ step: name, result }));
}

// watched returns the type and the name of the first event of a watch.
function watched(path, labelSelector) {
  return new Promise((resolve, reject) => {
    new k8s.Watch(config)
      .watch(path, { labelSelector, timeoutSeconds: 30 },
        (type, object) => resolve({ type, name: object.metadata.name }), reject)
      .catch(reject);
  });
}

const merge = k8s.setHeaderOptions('Content-Type', k8s.PatchStrategy.MergePatch);
const labels = { tour: 'javascript' };
const labelSelector = 'tour=javascript';
const metadata = (name) => ({ name, labels });
const deployment = {
  metadata: metadata('tour'),
  spec: {
    replicas: 2,
    selector: { matchLabels: labels },
    template: { metadata: { labels }, spec: { containers: [{ name: 'c', image: 'i' }] } },
  },
};
const well = { apiVersion: 'water.example.com/v1', kind: 'Well', metadata: metadata('tour'), spec: { owner: 'me' } };

await step('versions', () => config.makeApiClient(k8s.CoreApi).getAPIVersions());
await step('version', () => config.makeApiClient(k8s.VersionApi).getCode());
await step('groups', () => config.makeApiClient(k8s.ApisApi).getAPIVersions());
await step('group', () => config.makeApiClient(k8s.AppsApi).getAPIGroup());
await step('resources', () => apps.getAPIResources());
await step('issuer', () => config.makeApiClient(k8s.WellKnownApi).getServiceAccountIssuerOpenIDConfiguration());

await step('create a ConfigMap', () =>
  core.createNamespacedConfigMap({ namespace, body: { metadata: metadata('tour'), data: { a: '1' } } }));
await step('create it again', () =>
  core.createNamespacedConfigMap({ namespace, body: { metadata: metadata('tour') } }));
await step('get it', () => core.readNamespacedConfigMap({ namespace, name: 'tour' }));
await step('list it', () => core.listNamespacedConfigMap({ namespace, labelSelector }));
await step('watch it', () => watched(`/api/v1/namespaces/${namespace}/configmaps`, labelSelector));
await step('patch it', () =>
  core.patchNamespacedConfigMap({ namespace, name: 'tour', body: { data: { b: '2' } } }, merge));
await step('delete it', () => core.deleteNamespacedConfigMap({ namespace, name: 'tour' }));
await step('get it again', () => core.readNamespacedConfigMap({ namespace, name: 'tour' }));

await step('create a Deployment', () => apps.createNamespacedDeployment({ namespace, body: deployment }));
await step('get its scale', () => apps.readNamespacedDeploymentScale({ namespace, name: 'tour' }));
await step('list it', () => apps.listDeploymentForAllNamespaces({ labelSelector }));
await step('watch it', () => watched('/apis/apps/v1/deployments', labelSelector));
await step('patch it', () =>
  apps.patchNamespacedDeployment({ namespace, name: 'tour', body: { spec: { replicas: 3 } } }, merge));
await step('an invalid patch', () =>
  apps.patchNamespacedDeployment({ namespace, name: 'tour', body: { spec: { replicas: -1 } } }, merge));
await step('delete it', () => apps.deleteNamespacedDeployment({ namespace, name: 'tour' }));

await step('create a Well', () => custom.createNamespacedCustomObject({ ...group, body: well }));
await step('an invalid Well', () =>
  custom.createNamespacedCustomObject({ ...group, body: { ...well, spec: { owner: 'NO' } } }));
await step('get it', () => objects.read(well));
await step('list it', () => custom.listNamespacedCustomObject({ ...group, labelSelector }));
await step('watch it', () => watched('/apis/water.example.com/v1/wells', labelSelector));
await step('patch it', () => objects.patch({ ...well, spec: { depth: 9 } }, undefined, undefined, 'tour', undefined,
  k8s.PatchStrategy.MergePatch));
await step('delete it', () => objects.delete(well));
process.exit(0); // the watches are open
